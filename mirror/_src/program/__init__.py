"""The replica program: a step traced for one replica, and the proof of what stays in step."""
