"""Adapters to the frameworks in which models are trained. Each needs its framework installed, and only that."""
