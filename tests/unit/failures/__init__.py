"""What the library refuses, by what is wrong: each row an error, its text, and a call that provokes it."""
