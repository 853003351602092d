"""Records that cross a boundary between rooms or processes. No behaviour beyond packing and naming
fields.

All are `msgspec.Struct`s: frozen, typed, msgpack-encodable in microseconds.
"""
