"""Training programs of the JAX ecosystem, written for one replica and for one device."""
