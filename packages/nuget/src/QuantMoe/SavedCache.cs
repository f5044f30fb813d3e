using System;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;

namespace QuantMoe
{
    /// <summary>
    /// A prompt on disk, as <c>quantmoe generate --save-state</c> writes it: a safetensors file of tokens and what a cache has of
    /// them (docs/reference/exported-folder.md, "Saved prompts"). Opened and checked.
    /// </summary>
    sealed class SavedCache : IDisposable
    {
        struct Entry
        {
            public string Dtype;
            public long[] Shape;
            public long Begin, End;
        }

        readonly string path;
        readonly IReadOnlyList<CacheInput> inputs = Array.Empty<CacheInput>();
        readonly FileStream file;
        readonly SortedDictionary<string, Entry> entries = new SortedDictionary<string, Entry>(StringComparer.Ordinal);
        readonly Dictionary<string, Entry> found = new Dictionary<string, Entry>(); // those that this model's cache has
        readonly byte[] part = new byte[1 << 20];
        readonly long[] ends = Array.Empty<long>();

        /// <summary>Open a file and read its header alone.</summary>
        /// <exception cref="InvalidDataException">The file is no safetensors file.</exception>
        /// <exception cref="IOException">The file cannot be read.</exception>
        SavedCache(string path)
        {
            this.path = path;
            file = File.OpenRead(path);
            try
            {
                ReadHeader();
            }
            catch
            {
                file.Dispose();
                throw;
            }
        }

        /// <exception cref="InvalidDataException">The file is damaged or of another model.</exception>
        /// <exception cref="IOException">The file cannot be read.</exception>
        public SavedCache(string path, string identity, IReadOnlyList<CacheInput> inputs) : this(path)
        {
            this.inputs = inputs;
            bool hybrid = inputs.Any(input => input.IsState);
            try
            {
                byte[] model = Bytes(Take("model", "U8", 1, new long[] { identity.Length }));
                if (Encoding.ASCII.GetString(model) != identity) throw Bad("saved with another model: its identity is another");
                if (!entries.ContainsKey("checksum")) throw Bad("checksum is missing: save it again");
                Entry checksum = Take("checksum", "U32", 4, new long[] { 1 });
                long length = 0;
                if (entries.TryGetValue("tokens", out Entry row) && row.Shape.Length > 0) length = (row.End - row.Begin) / 8;
                byte[] numbers = Bytes(Take("tokens", "I64", 8, new[] { length }));
                Tokens = new long[length];
                Buffer.BlockCopy(numbers, 0, Tokens, 0, numbers.Length);
                ends = hybrid ? Ends() : Array.Empty<long>();
                foreach (CacheInput input in inputs)
                    if (!input.IsState)
                        found[input.Name] = Take(input.Name, input.Dtype, input.Size, input.Saved(length));
                    else
                        foreach (long end in ends)
                            found[$"{input.Name}@{end}"] = Take($"{input.Name}@{end}", input.Dtype, input.Size, input.Saved(0));
                if (entries.Count > 0) throw Bad($"{entries.Keys.First()} is not of this model's cache");
                if (hybrid && (ends.Length == 0 || ends[ends.Length - 1] != length))
                    throw Bad($"expected states after its {length} tokens, found those after {List(ends)}");
                CheckBytes(checksum);
            }
            catch
            {
                file.Dispose();
                throw;
            }
        }

        /// <summary>The tokens that were read.</summary>
        public long[] Tokens { get; } = Array.Empty<long>();

        public void Dispose() => file.Dispose();

        /// <summary>Put all that the file has of an input into a cache's tensor.</summary>
        public void Load(CacheInput input, OrtValue value)
        {
            Entry entry = found[input.IsState ? $"{input.Name}@{Tokens.Length}" : input.Name];
            var pieces = input.Pieces(value, Tokens.Length);
            for (int i = 0; i < pieces.Count; i++)
                for (int at = 0; at < pieces.Bytes;)
                {
                    int bytes = Math.Min(part.Length, pieces.Bytes - at);
                    Read(entry.Begin + (long)i * pieces.Bytes + at, part, bytes);
                    part.AsSpan(0, bytes).CopyTo(value.GetTensorMutableRawData().Slice(pieces.Begin + i * pieces.Stride + at));
                    at += bytes;
                }
        }

        /// <summary>Return the states by the number of tokens that they are of.</summary>
        public IEnumerable<KeyValuePair<long, List<byte[]>>> LoadStates() =>
            ends.Select(end => new KeyValuePair<long, List<byte[]>>(
                end, inputs.Where(input => input.IsState).Select(input => Bytes(found[$"{input.Name}@{end}"])).ToList()));

        /// <summary>Return copies of a cache's states.</summary>
        public static List<byte[]> States(IReadOnlyList<CacheInput> inputs, IReadOnlyList<OrtValue> cache)
        {
            var states = new List<byte[]>();
            for (int i = 0; i < inputs.Count; i++)
                if (inputs[i].IsState)
                {
                    var piece = inputs[i].Pieces(cache[i], 0);
                    states.Add(cache[i].GetTensorMutableRawData().Slice(piece.Begin, piece.Bytes).ToArray());
                }
            return states;
        }

        /// <summary>Write the cache of tokens, and states to go back to. The file has its name when all is there.</summary>
        /// <exception cref="IOException">The file cannot be written, or is no saved state.</exception>
        /// <exception cref="UnauthorizedAccessException">The file may not be written.</exception>
        public static void Save(string path, string identity, long[] tokens, IReadOnlyList<CacheInput> inputs,
            IReadOnlyList<OrtValue> cache, SortedDictionary<long, List<byte[]>> states)
        {
            path = Target(path);
            if (!IsReplaceable(path))
                throw new IOException($"{path}: is there, and is no saved state: expected an earlier one, or no file");
            // Savers of one path each write a file of their own.
            string partial = $"{path}.{Guid.NewGuid():N}.partial";
            using (var file = new FileStream(partial, FileMode.CreateNew, FileAccess.Write)) // fails before there is a file to delete
                try
                {
                    Write(file, identity, tokens, inputs, cache, states);
                }
                catch
                {
                    file.Dispose();
                    File.Delete(partial);
                    throw;
                }
            try
            {
                Replace(partial, path);
            }
            catch
            {
                File.Delete(partial);
                throw;
            }
        }

        static bool IsReplaceable(string path)
        {
            var there = new FileInfo(path);
            if (!there.Exists || there.Length == 0) return true;
            try
            {
                using var saved = new SavedCache(path);
                return saved.entries.ContainsKey("model") && saved.entries.ContainsKey("tokens");
            }
            catch (InvalidDataException)
            {
                return false;
            }
        }

        static void Write(FileStream file, string identity, long[] tokens, IReadOnlyList<CacheInput> inputs,
            IReadOnlyList<OrtValue> cache, SortedDictionary<long, List<byte[]>> states)
        {
            var header = new StringBuilder();
            var writes = new List<Action>();
            var part = new byte[1 << 20];
            long offset = 0;
            uint checksum = 0; // of what is before it
            void Put(ReadOnlySpan<byte> bytes)
            {
                checksum = Crc32.Add(checksum, bytes);
                for (; bytes.Length > 0; bytes = bytes.Slice(Math.Min(part.Length, bytes.Length)))
                {
                    ReadOnlySpan<byte> next = bytes.Slice(0, Math.Min(part.Length, bytes.Length));
                    next.CopyTo(part);
                    file.Write(part, 0, next.Length);
                }
            }
            void Add(string name, string dtype, long[] shape, long bytes, Action write)
            {
                header.Append(header.Length == 0 ? "{" : ", ");
                header.Append($"\"{name}\": {{\"dtype\": \"{dtype}\", \"shape\": {List(shape)}, ");
                header.Append($"\"data_offsets\": {List(new[] { offset, offset + bytes })}}}");
                offset += bytes;
                writes.Add(write);
            }
            void AddBytes(string name, string dtype, long[] shape, byte[] bytes) => Add(name, dtype, shape, bytes.Length, () => Put(bytes));

            AddBytes("model", "U8", new long[] { identity.Length }, Encoding.ASCII.GetBytes(identity));
            var row = new byte[8 * tokens.Length];
            Buffer.BlockCopy(tokens, 0, row, 0, row.Length);
            AddBytes("tokens", "I64", new long[] { tokens.Length }, row);
            for (int n = 0; n < inputs.Count; n++)
            {
                if (inputs[n].IsState) continue;
                OrtValue value = cache[n];
                var pieces = inputs[n].Pieces(value, tokens.Length);
                Add(inputs[n].Name, inputs[n].Dtype, inputs[n].Saved(tokens.Length), (long)pieces.Count * pieces.Bytes, () =>
                {
                    for (int i = 0; i < pieces.Count; i++)
                        Put(value.GetTensorMutableRawData().Slice(pieces.Begin + i * pieces.Stride, pieces.Bytes));
                });
            }
            foreach (var end in states)
            {
                int at = 0;
                foreach (CacheInput input in inputs.Where(input => input.IsState))
                    AddBytes($"{input.Name}@{end.Key}", input.Dtype, input.Saved(0), end.Value[at++]);
            }
            Add("checksum", "U32", new long[] { 1 }, 4, () => Put(BitConverter.GetBytes(checksum)));
            header.Append('}').Append(' ', (8 - header.Length % 8) % 8);
            Put(BitConverter.GetBytes((long)header.Length));
            Put(Encoding.ASCII.GetBytes(header.ToString()));
            foreach (Action write in writes) write();
        }

#if NET
        /// <summary>Return where a link leads.</summary>
        static string Target(string path) =>
            new FileInfo(path).LinkTarget == null ? path : File.ResolveLinkTarget(path, returnFinalTarget: true)!.FullName;

        static void Replace(string partial, string path) => File.Move(partial, path, overwrite: true);
#else
        /// <exception cref="IOException">The path is a link: .NET Standard cannot tell where it leads.</exception>
        static string Target(string path)
        {
            var link = new FileInfo(path);
            if (link.Exists && (link.Attributes & FileAttributes.ReparsePoint) != 0)
                throw new IOException($"{path} is a symbolic link, expected a file; name the file to which it leads");
            return path;
        }

        static void Replace(string partial, string path)
        {
            if (!File.Exists(path))
                try
                {
                    File.Move(partial, path);
                    return;
                }
                catch (IOException) when (File.Exists(path)) // of another saver
                {
                }
            File.Replace(partial, path, null);
        }
#endif

        public static long Count(long[] shape) => shape.Aggregate(1L, (product, dim) => checked(product * dim));

        public static string List(long[] numbers) => $"[{string.Join(", ", numbers)}]";

        InvalidDataException Bad(string text) => new InvalidDataException($"{path}: {text}");

        void ReadHeader()
        {
            if (file.Length < 8) throw Bad($"{file.Length} bytes, expected a safetensors file");
            Read(0, part, 8);
            long length = BitConverter.ToInt64(part, 0);
            if (length < 0 || length > file.Length - 8) throw Bad($"a header of {length} bytes; is the file truncated?");
            var header = new byte[length];
            Read(8, header, header.Length);
            try
            {
                using JsonDocument json = JsonDocument.Parse(header);
                foreach (JsonProperty property in json.RootElement.EnumerateObject())
                {
                    if (property.Name == "__metadata__") continue;
                    long[] Longs(string name) =>
                        property.Value.GetProperty(name).EnumerateArray().Select(number => number.GetInt64()).ToArray();
                    long[] offsets = Longs("data_offsets");
                    if (offsets.Length != 2 || offsets[0] < 0 || offsets[0] > offsets[1] || offsets[1] > file.Length - 8 - length)
                        throw Bad($"{property.Name}: data_offsets {List(offsets)} in a file of {file.Length} bytes; is it truncated?");
                    entries[property.Name] = new Entry
                    {
                        Dtype = property.Value.GetProperty("dtype").GetString() ?? "",
                        Shape = Longs("shape"),
                        Begin = 8 + length + offsets[0],
                        End = 8 + length + offsets[1],
                    };
                }
            }
            catch (Exception error) when (error is JsonException || error is InvalidOperationException || error is KeyNotFoundException
                || error is FormatException)
            {
                throw Bad($"corrupt header: {error.Message}");
            }
        }

        // The numbers after @ in names of states.
        long[] Ends()
        {
            var after = new SortedSet<long>();
            foreach (string name in entries.Keys)
                if (name.IndexOf('@') is int at && at >= 0
                    && int.TryParse(name.Substring(at + 1), NumberStyles.None, CultureInfo.InvariantCulture, out int end))
                    after.Add(end);
            return after.ToArray();
        }

        /// <exception cref="InvalidDataException">The bytes before the checksum are others than were saved.</exception>
        void CheckBytes(Entry checksum)
        {
            if (checksum.End != file.Length) throw Bad("checksum is not its last tensor");
            uint crc = 0;
            for (long at = 0; at < checksum.Begin;)
            {
                int bytes = (int)Math.Min(part.Length, checksum.Begin - at);
                Read(at, part, bytes);
                crc = Crc32.Add(crc, part.AsSpan(0, bytes));
                at += bytes;
            }
            if (crc != BitConverter.ToUInt32(Bytes(checksum), 0))
                throw Bad("was altered or is damaged: its bytes have another CRC-32 than its checksum says");
        }

        Entry Take(string name, string dtype, int size, long[] shape)
        {
            if (!entries.TryGetValue(name, out Entry entry)) throw Bad($"{name} is missing");
            entries.Remove(name);
            if (entry.Dtype != dtype || !entry.Shape.SequenceEqual(shape) || entry.End - entry.Begin != Count(shape) * size)
                throw Bad($"{name} is {entry.Dtype} {List(entry.Shape)}, expected {dtype} {List(shape)} of this model");
            return entry;
        }

        byte[] Bytes(Entry entry)
        {
            var bytes = new byte[entry.End - entry.Begin];
            Read(entry.Begin, bytes, bytes.Length);
            return bytes;
        }

        void Read(long from, byte[] to, int bytes)
        {
            file.Position = from;
            for (int at = 0; at < bytes;)
            {
                int count = file.Read(to, at, bytes - at);
                if (count == 0) throw Bad("cannot be read to its end");
                at += count;
            }
        }
    }
}
