"""The version, read by the build and by `mirror.__version__`."""

__version__ = "0.2.0"
