"""A step in words: what the proof found, and where its time and its memory go."""
