"""Tests of score modifications: a package, so that its modules may share names with tests of other packages."""
