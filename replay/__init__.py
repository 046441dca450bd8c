"""Will execute decisions on real hardware; holds nothing yet."""
