"""Writes to a key-value store without syncs, or reads it: unsynced.py lmdb|rocksdb write|read DIRECTORY

Transactions come as lines: "set KEY VALUE", "del KEY", and "commit NUMBER", which is answered. Reading gives lines
"KEY VALUE".
"""

import ctypes
import ctypes.util
import sys


class Value(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("data", ctypes.c_void_p)]

    def of(data):
        return Value(len(data), ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p))

    def bytes(self):
        return ctypes.string_at(self.data, self.size)


class Lmdb:
    """LMDB with MDB_NOSYNC: pages and the root that names them are written, and never synced."""

    NOSYNC = 0x10000
    CREATE = 0x40000
    READ_ONLY = 0x20000
    NOT_FOUND = -30798
    NEXT = 8

    def __init__(self, directory):
        self.lib = ctypes.CDLL("liblmdb.so.0")
        self.lib.mdb_strerror.restype = ctypes.c_char_p
        self.env = ctypes.c_void_p()
        self.call("mdb_env_create", ctypes.byref(self.env))
        self.call("mdb_env_set_mapsize", self.env, ctypes.c_size_t(32 << 20))
        self.call("mdb_env_open", self.env, directory.encode(), ctypes.c_uint(self.NOSYNC), 0o644)

    def call(self, name, *args, also=()):
        code = getattr(self.lib, name)(*args)
        if code != 0 and code not in also:
            sys.exit(f"{name}: {self.lib.mdb_strerror(code).decode()}")
        return code

    def begin(self, flags):
        txn, table = ctypes.c_void_p(), ctypes.c_uint()
        self.call("mdb_txn_begin", self.env, None, ctypes.c_uint(flags), ctypes.byref(txn))
        self.call("mdb_dbi_open", txn, None, ctypes.c_uint(0), ctypes.byref(table))
        return txn, table

    def write(self, changes):
        txn, table = self.begin(0)
        for key, value in changes:
            key = ctypes.byref(Value.of(key))
            if value is None:
                self.call("mdb_del", txn, table, key, None, also=[self.NOT_FOUND])
            else:
                self.call("mdb_put", txn, table, key, ctypes.byref(Value.of(value)), ctypes.c_uint(0))
        self.call("mdb_txn_commit", txn)

    def read(self):
        txn, table = self.begin(self.READ_ONLY)
        cursor, key, value = ctypes.c_void_p(), Value(), Value()
        self.call("mdb_cursor_open", txn, table, ctypes.byref(cursor))
        at = [cursor, ctypes.byref(key), ctypes.byref(value), self.NEXT]
        while self.call("mdb_cursor_get", *at, also=[self.NOT_FOUND]) == 0:
            yield key.bytes(), value.bytes()


class RocksDb:
    """RocksDB as it is by default: its log is written, and not synced; with tables that are full soon."""

    def __init__(self, directory):
        self.lib = ctypes.CDLL(ctypes.util.find_library("rocksdb"))
        options = self.make("rocksdb_options_create")
        self.lib.rocksdb_options_set_create_if_missing(options, ctypes.c_ubyte(1))
        self.lib.rocksdb_options_set_write_buffer_size(options, ctypes.c_size_t(128 << 10))
        self.db = self.checked("rocksdb_open", options, directory.encode())
        self.how = self.make("rocksdb_writeoptions_create")

    def make(self, name, *args):
        function = getattr(self.lib, name)
        function.restype = ctypes.c_void_p
        return ctypes.c_void_p(function(*args))

    def checked(self, name, *args):
        error = ctypes.c_char_p()
        result = self.make(name, *args, ctypes.byref(error))
        if error.value is not None:
            sys.exit(f"{name}: {error.value.decode()}")
        return result

    def write(self, changes):
        batch = self.make("rocksdb_writebatch_create")
        for key, value in changes:
            key = [key, ctypes.c_size_t(len(key))]
            if value is None:
                self.lib.rocksdb_writebatch_delete(batch, *key)
            else:
                self.lib.rocksdb_writebatch_put(batch, *key, value, ctypes.c_size_t(len(value)))
        self.checked("rocksdb_write", self.db, self.how, batch)
        self.lib.rocksdb_writebatch_destroy(batch)

    def text(self, name, at):
        size = ctypes.c_size_t()
        return ctypes.string_at(self.make(name, at, ctypes.byref(size)), size.value)

    def read(self):
        at = self.make("rocksdb_create_iterator", self.db, self.make("rocksdb_readoptions_create"))
        self.lib.rocksdb_iter_valid.restype = ctypes.c_ubyte
        self.lib.rocksdb_iter_seek_to_first(at)
        while self.lib.rocksdb_iter_valid(at):
            yield self.text("rocksdb_iter_key", at), self.text("rocksdb_iter_value", at)
            self.lib.rocksdb_iter_next(at)


def serve(store):
    changes = []
    for line in sys.stdin.buffer:
        verb, *rest = line.split()
        if verb == b"set":
            changes.append((rest[0], rest[1]))
        elif verb == b"del":
            changes.append((rest[0], None))
        else:
            store.write(changes)
            changes = []
            print("acknowledged", rest[0].decode(), flush=True)


if __name__ == "__main__":
    name, what, directory = sys.argv[1:]
    store = {"lmdb": Lmdb, "rocksdb": RocksDb}[name](directory)
    if what == "write":
        serve(store)
    else:
        for key, value in store.read():
            print(key.decode(), value.decode())
