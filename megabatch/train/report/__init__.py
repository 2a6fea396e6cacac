"""A run as a page that a browser shows: what it records for it, what is read of it, and how it is written or served."""
