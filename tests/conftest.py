import gc
import os

from hypothesis import settings

# before torch is imported: its threads fight over the cores that tests of small models do not fill
os.environ.setdefault("OMP_NUM_THREADS", "1")

# as commands do: what numba makes while it compiles is millions of objects, which to search takes a seventh of its time
gc.set_threshold(20_000, 20, 20)

# the first example of a test may compile what it tests
settings.register_profile("oledsim", deadline=None)
settings.load_profile("oledsim")

# what compiles most comes first, beside one that compiles little, so that others find it compiled; then the few that take
# long: if they were handed out last, one process would run them while the others have nothing to do
_FIRST = (
    "test_clock_loop.py",
    "test_record.py",
    "test_compiled.py",
    "test_notebooks.py",
    "test_launchers.py",
    "test_calibrate.py",
    "test_bench.py",
    "test_wheel.py",
)


def pytest_collection_modifyitems(items):
    gc.freeze()
    places = {name: place for place, name in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
