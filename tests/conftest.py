import os

from hypothesis import settings

# before torch is imported: its threads fight over the cores that tests of small models do not fill
os.environ.setdefault("OMP_NUM_THREADS", "1")

# the first example of a test may compile what it tests
settings.register_profile("oledsim", deadline=None)
settings.load_profile("oledsim")
