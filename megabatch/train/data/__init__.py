"""Data: from files of text to the samples of an update."""
