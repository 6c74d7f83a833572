"""Reports about a step: the values and collectives that were proved, its time and its memory."""
