"""Attainment of Prism and of the rival policies on the same engines and devices: see :mod:`benchmarks.slo.compare`."""
