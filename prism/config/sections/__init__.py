"""The sections of a catalog as frozen objects: the one definition of all keys, which gives parser, checks, JSON schema
and defaults. :mod:`prism.config.document` is the file that they make up.

Attribute names carry units (``ttft_s``, ``min_kv_bytes``); the keys people write (``ttft``, ``min_kv_memory``) do not,
because the values do: ``500ms``, ``64MiB``. Every key has a description, which the schema shows in editors.
"""
