from hypothesis import settings

# the first example of a test may compile what it tests
settings.register_profile("oledsim", deadline=None)
settings.load_profile("oledsim")
