"""Two CPU devices for every test, and shape mistakes made loud: ``[K] * [K, d]`` raises."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_numpy_rank_promotion", "raise")
