"""A step in words: what the proof found in its program, and where its time goes."""
