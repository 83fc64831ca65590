"""The kernels of the CuPy backend run in the simulator here, also on a machine with a GPU."""

import os

from precondattn_cupy.launch import SIMULATE

os.environ[SIMULATE] = "1"
