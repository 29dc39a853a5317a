"""What tests of Steelyard, ours and our users', share: a pool of gloo workers on one machine."""
