"""A run's page: read from the run's folder, written as one file."""
