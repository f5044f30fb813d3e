# What a library exports, sorted: exports DLL, symbols LIBRARY.so.
exports() { # of a DLL
  python -c 'import sys, struct
data = open(sys.argv[1], "rb").read()
u16, u32 = (lambda at: struct.unpack_from("<H", data, at)[0]), (lambda at: struct.unpack_from("<I", data, at)[0])
pe = u32(60)
first = pe + 24 + u16(pe + 20)
parts = [struct.unpack_from("<III", data, first + 40 * i + 12) for i in range(u16(pe + 6))]
at = lambda rva: next(rva - start + offset for start, size, offset in parts if start <= rva < start + size)
table = at(u32(pe + 24 + 112))
names = at(u32(table + 32))
for i in range(u32(table + 24)):
    name = at(u32(names + 4 * i))
    print(data[name : data.index(b"\0", name)].decode())' "$1" | LC_ALL=C sort
}
symbols() { nm -D --defined-only "$1" | awk '{ print $3 }' | sed 's/@.*//' | LC_ALL=C sort; }
