"""Where tests put a simulator, which runs kernels as Python without a GPU; the package itself has none.

A simulator (``tests/support/simulator/hook.py``) is a module with ``cuda`` in place of ``numba.cuda``,
``INSTRUCTIONS``, by name, in place of those of `ptx`, and ``launch(kernel, grid, threads, shared, arguments)``. It runs
on that of Numba (``NUMBA_ENABLE_CUDASIM=1``) and has to be put here before the first kernel is imported.
"""

from __future__ import annotations

from typing import Any

simulator: Any = None
