using System;
using System.Buffers.Binary;
using System.Linq;

namespace QuantMoe
{
    /// <summary>zlib's CRC-32, eight bytes at a time.</summary>
    static class Crc32
    {
        static readonly uint[][] tables = MakeTables(); // what a byte so many places before the last adds

        static uint[][] MakeTables()
        {
            var made = Enumerable.Range(0, 8).Select(place => new uint[256]).ToArray();
            for (uint i = 0; i < 256; i++)
            {
                uint crc = i;
                for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
                made[0][i] = crc;
            }
            for (int place = 1; place < 8; place++)
                for (int i = 0; i < 256; i++) made[place][i] = made[place - 1][i] >> 8 ^ made[0][made[place - 1][i] & 255];
            return made;
        }

        /// <summary>Return the CRC-32 of bytes after others that have <paramref name="crc"/>, 0 of none.</summary>
        public static uint Add(uint crc, ReadOnlySpan<byte> bytes)
        {
            crc = ~crc;
            for (; bytes.Length >= 8; bytes = bytes.Slice(8))
            {
                ulong word = BinaryPrimitives.ReadUInt64LittleEndian(bytes) ^ crc;
                crc = 0;
                for (int i = 0; i < 8; i++) crc ^= tables[7 - i][word >> 8 * i & 255];
            }
            foreach (byte last in bytes) crc = crc >> 8 ^ tables[0][(crc ^ last) & 255];
            return ~crc;
        }
    }
}
