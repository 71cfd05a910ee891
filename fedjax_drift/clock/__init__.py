"""Virtual time: how long a round takes, and whether the server waits for all of its clients.

    sim = fd.Simulation(model, data, algorithm, cohort_size=100, devices=fd.Devices(speed_spread=0.5, up=1e6, down=1e7))
    sim = fd.Simulation(model, data, algorithm, cohort_size=100, clock=fd.clock.asynchronous(concurrency=1000))

`synchronous` is the default. With ``devices=``, or with `asynchronous`, ``info["time"]`` is the virtual time in
seconds.
"""

from fedjax_drift.clock.clock import Clock, asynchronous, synchronous
from fedjax_drift.clock.devices import Devices

__all__ = ["Clock", "Devices", "asynchronous", "synchronous"]
__dir__ = __all__.copy
