"""Catalog YAML -> frozen objects, their JSON schema, the difference between two of them, the state directory.

``load_catalog(path)`` in :mod:`prism.config.catalog` is the door;
:mod:`prism.config.sections` has the one definition of all keys.
"""
