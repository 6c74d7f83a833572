"""What happens beside a training; `mirror.callbacks` is their table of contents."""
