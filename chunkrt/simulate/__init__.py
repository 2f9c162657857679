"""Performance prediction for devices that you do not have: device profiles, model shapes and the simulator.

from chunkrt.simulate import find_device, find_shape, simulate

simulation = simulate(
    find_shape("gemma-2b").plan(),
    find_device("sd8gen3"),
    prompt_length=1024,
    chunk_length=128,
    policy="out_of_order",
    scheme="w8a16",
)
print(simulation.tokens_per_s)
"""

from chunkrt.simulate.link_profile import LINKS, LinkProfile, find_link
from chunkrt.simulate.measured import MeasuredProfile
from chunkrt.simulate.profile import DEVICES, DeviceProfile, find_device, read_profile
from chunkrt.simulate.serving import Serving, simulate_serving
from chunkrt.simulate.shape import Shape, find_shape, shapes
from chunkrt.simulate.simulator import Simulation, simulate

__all__ = [
    "DEVICES",
    "LINKS",
    "DeviceProfile",
    "LinkProfile",
    "MeasuredProfile",
    "Serving",
    "Shape",
    "Simulation",
    "find_device",
    "find_link",
    "find_shape",
    "read_profile",
    "shapes",
    "simulate",
    "simulate_serving",
]
