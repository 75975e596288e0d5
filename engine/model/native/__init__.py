"""The parts of a model's forward that torch does too slowly on CPUs. Without a C++ compiler, torch does them."""
