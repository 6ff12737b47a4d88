"""Tests of the PTX emulator: a package, so that its modules may share names with tests of other packages."""
