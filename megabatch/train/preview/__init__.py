"""Preview: samples as a model gets them, and text that it writes, in the terminal."""
