"""How one launch happens: on a GPU, or on the emulator; the same calls, so that the same tests run on both."""
