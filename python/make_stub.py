"""Writes the type stub of the compiled module: make_stub.py PACKAGE PATTERNS OUTPUT.

The package's own __init__.py does not run: it replaces the functions whose signatures stubgen reads.
"""

import sys
import types

from nanobind import stubgen

package, patterns, output = sys.argv[1:]
bare = types.ModuleType("ladon")
bare.__path__ = [package]
sys.modules["ladon"] = bare
stubgen.main(["-q", "-m", "ladon._ladon", "-p", patterns, "-o", output])
