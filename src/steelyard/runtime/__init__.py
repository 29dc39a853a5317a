"""Carries out dispatch plans with tensors: the exchange around core attention, plain or ping-pong."""
