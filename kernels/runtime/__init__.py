"""How kernels are declared, compiled, cached, checked and launched; where arrays live."""
