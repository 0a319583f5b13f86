"""How kernels are declared, compiled, kept and launched; where arrays live."""
