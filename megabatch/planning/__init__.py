"""Lengths in, plans out: samples balanced over ranks and split into microbatches, without torch."""
