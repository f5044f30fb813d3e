using System;
using System.Buffers.Binary;
using System.Collections.Generic;
using System.Globalization;
using System.IO;
using System.Linq;
using System.Text;
using System.Text.Json;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

/// One of the model's inputs past_key_values.*: keys or values [1, heads, length, width], or a state of linear attention,
/// which is of all tokens so far; a model of --state-window has those after each of the last tokens in front.
sealed class Past
{
    public readonly string Name, Present, Dtype;
    public readonly TensorElementType Type;
    public readonly bool IsState;
    public readonly int Size; // bytes of a number
    readonly long[] dims; // -1: the length
    readonly int window; // dimensions in front of the batch's

    public Past(string name, NodeMetadata input)
    {
        (Name, Present, Type) = (name, name.Replace("past_key_values", "present"), input.ElementDataType);
        IsState = name.EndsWith("_state");
        dims = input.Dimensions.Select(dim => (long)dim).ToArray();
        window = dims.Length - (name.EndsWith(".conv_state") ? 3 : 4);
        if (window != 0 && !(window == 1 && IsState))
            throw new InvalidDataException($"{name} has shape {StateFile.List(dims)}, which this program does not know");
        dims[window] = 1; // of the batch
        switch (Type)
        {
            case TensorElementType.Float: (Dtype, Size) = ("F32", 4); break;
            case TensorElementType.Float16: (Dtype, Size) = ("F16", 2); break;
            case TensorElementType.BFloat16: (Dtype, Size) = ("BF16", 2); break;
            case TensorElementType.Int8: (Dtype, Size) = ("I8", 1); break;
            case TensorElementType.UInt8: (Dtype, Size) = ("U8", 1); break;
            default: throw new InvalidDataException($"{name} is {Type}, which this program does not know");
        }
    }

    /// Of a cache of so many slots.
    public long[] Shape(long slots) => dims.Select(dim => dim < 0 ? slots : dim).ToArray();

    /// Of so many tokens in a file.
    public long[] Saved(long length) => Shape(length).Skip(window).ToArray();

    /// Where the first tokens' keys or values are in a cache's tensor, or the state, the last of the window: so many pieces
    /// of so many bytes, a stride apart.
    public (int Begin, int Count, int Stride, int Bytes) Pieces(OrtValue value, long length)
    {
        long[] shape = value.GetTensorTypeAndShape().Shape;
        if (!IsState)
            return (0, checked((int)shape[1]), checked((int)(shape[2] * shape[3] * Size)), checked((int)(length * shape[3] * Size)));
        int bytes = checked((int)(StateFile.Count(Saved(0)) * Size));
        return (checked((int)(StateFile.Count(shape) * Size)) - bytes, 1, 0, bytes);
    }
}

/// A prompt on disk, as `quantmoe generate --save-state` writes it: a safetensors file of tokens and what a cache has of them
/// (docs/reference/exported-folder.md, "Saved prompts"). Opened and checked.
sealed class StateFile : IDisposable
{
    struct Entry
    {
        public string Dtype;
        public long[] Shape;
        public long Begin, End;
    }

    readonly string path;
    readonly IReadOnlyList<Past> pasts;
    readonly FileStream file;
    readonly SortedDictionary<string, Entry> entries = new SortedDictionary<string, Entry>(StringComparer.Ordinal);
    readonly Dictionary<string, Entry> found = new Dictionary<string, Entry>(); // those that this model's cache has
    readonly long[] tokens, ends;
    readonly bool hybrid;

    public StateFile(string path, string identity, IReadOnlyList<Past> pasts)
    {
        this.path = path;
        this.pasts = pasts;
        hybrid = pasts.Any(past => past.IsState);
        file = File.OpenRead(path);
        try
        {
            ReadHeader();
            byte[] model = Bytes(Take("model", "U8", 1, new long[] { identity.Length }));
            if (Encoding.ASCII.GetString(model) != identity) throw Bad("saved with another model: its identity is another");
            if (!entries.ContainsKey("checksum")) throw Bad("checksum is missing, as in files of earlier versions: save it again");
            Entry checksum = Take("checksum", "U32", 4, new long[] { 1 });
            long length = 0;
            if (entries.TryGetValue("tokens", out Entry row) && row.Shape.Length > 0) length = (row.End - row.Begin) / 8;
            byte[] numbers = Bytes(Take("tokens", "I64", 8, new[] { length }));
            tokens = new long[length];
            Buffer.BlockCopy(numbers, 0, tokens, 0, numbers.Length);
            var after = new SortedSet<long>();
            foreach (string name in entries.Keys)
                if (name.Contains('@') && int.TryParse(
                        name.Substring(name.IndexOf('@') + 1), NumberStyles.None, CultureInfo.InvariantCulture, out int end))
                    after.Add(end);
            ends = hybrid ? after.ToArray() : new long[0];
            foreach (Past past in pasts)
                if (!past.IsState)
                    found[past.Name] = Take(past.Name, past.Dtype, past.Size, past.Saved(length));
                else
                    foreach (long end in ends)
                        found[$"{past.Name}@{end}"] = Take($"{past.Name}@{end}", past.Dtype, past.Size, past.Saved(0));
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

    public void Dispose() => file.Dispose();

    /// How many of its tokens begin a prompt, the last one aside, whose logits are wanted; where there are states, to one of
    /// the lengths that it has those of.
    public int Keep(long[] ids)
    {
        int same = 0;
        while (same < Math.Min(tokens.Length, ids.Length - 1) && tokens[same] == ids[same]) same++;
        return hybrid ? (int)ends.LastOrDefault(end => end <= same) : same;
    }

    /// Puts the first tokens' part into a cache's tensor.
    public void Load(Past past, long length, OrtValue value)
    {
        if (length == 0) return;
        Entry entry = found[past.IsState ? $"{past.Name}@{length}" : past.Name];
        var pieces = past.Pieces(value, length);
        for (int i = 0; i < pieces.Count; i++)
            Read(entry.Begin + i * ((entry.End - entry.Begin) / pieces.Count),
                value.GetTensorMutableRawData().Slice(pieces.Begin + i * pieces.Stride, pieces.Bytes));
    }

    /// The states of so many tokens and fewer.
    public SortedDictionary<long, List<byte[]>> LoadEnds(long length)
    {
        var states = new SortedDictionary<long, List<byte[]>>();
        foreach (long end in ends.Where(end => end <= length))
            states[end] = pasts.Where(past => past.IsState).Select(past => Bytes(found[$"{past.Name}@{end}"])).ToList();
        return states;
    }

    /// Copies of a cache's states.
    public static List<byte[]> States(IReadOnlyList<Past> pasts, IReadOnlyList<OrtValue> cache)
    {
        var states = new List<byte[]>();
        for (int i = 0; i < pasts.Count; i++)
            if (pasts[i].IsState)
            {
                var piece = pasts[i].Pieces(cache[i], 0);
                states.Add(cache[i].GetTensorMutableRawData().Slice(piece.Begin, piece.Bytes).ToArray());
            }
        return states;
    }

    /// Writes the cache of these tokens, and states of fewer to go back to. The file has its name when all is there.
    public static void Save(string path, string identity, long[] tokens, IReadOnlyList<Past> pasts, IReadOnlyList<OrtValue> cache,
        SortedDictionary<long, List<byte[]>> ends)
    {
        if (identity == "") throw new InvalidDataException("the model has no identity in its metadata; export it again");
        if (tokens.Length == 0) throw new InvalidDataException($"{path}: the cache has no tokens to save");
        while (ends.Count > 4) ends.Remove(ends.Keys.First()); // states are large
        if (pasts.Any(past => past.IsState)) ends[tokens.Length] = States(pasts, cache);

        var header = new StringBuilder();
        var writes = new List<Action<Put>>();
        long offset = 0;
        void Add(string name, string dtype, long[] shape, long bytes, Action<Put> write)
        {
            header.Append(header.Length == 0 ? "{" : ", ");
            header.Append($"\"{name}\": {{\"dtype\": \"{dtype}\", \"shape\": {List(shape)}, ");
            header.Append($"\"data_offsets\": {List(new[] { offset, offset + bytes })}}}");
            offset += bytes;
            writes.Add(write);
        }
        void AddBytes(string name, string dtype, long[] shape, byte[] bytes) =>
            Add(name, dtype, shape, bytes.Length, put => put(bytes));

        AddBytes("model", "U8", new long[] { identity.Length }, Encoding.ASCII.GetBytes(identity));
        var row = new byte[8 * tokens.Length];
        Buffer.BlockCopy(tokens, 0, row, 0, row.Length);
        AddBytes("tokens", "I64", new long[] { tokens.Length }, row);
        for (int n = 0; n < pasts.Count; n++)
        {
            if (pasts[n].IsState) continue;
            OrtValue value = cache[n];
            var pieces = pasts[n].Pieces(value, tokens.Length);
            Add(pasts[n].Name, pasts[n].Dtype, pasts[n].Saved(tokens.Length), (long)pieces.Count * pieces.Bytes, put =>
            {
                for (int i = 0; i < pieces.Count; i++)
                    put(value.GetTensorMutableRawData().Slice(pieces.Begin + i * pieces.Stride, pieces.Bytes));
            });
        }
        foreach (var end in ends)
        {
            int at = 0;
            foreach (Past past in pasts.Where(past => past.IsState))
                AddBytes($"{past.Name}@{end.Key}", past.Dtype, past.Saved(0), end.Value[at++]);
        }
        uint checksum = 0; // of what is before it
        Add("checksum", "U32", new long[] { 1 }, 4, put => put(BitConverter.GetBytes(checksum)));
        header.Append('}').Append(' ', (8 - header.Length % 8) % 8);

        string partial = path + ".partial";
        try
        {
            using (FileStream file = File.Create(partial))
            {
                void Write(ReadOnlySpan<byte> bytes)
                {
                    file.Write(bytes);
                    checksum = Crc32(checksum, bytes);
                }
                Write(BitConverter.GetBytes((long)header.Length));
                Write(Encoding.ASCII.GetBytes(header.ToString()));
                foreach (var write in writes) write(Write);
            }
            File.Move(partial, path, overwrite: true);
        }
        finally
        {
            if (File.Exists(partial)) File.Delete(partial);
        }
    }

    /// Takes the next bytes of a file.
    delegate void Put(ReadOnlySpan<byte> bytes);

    // What a byte so many places before the last adds to a CRC-32.
    static readonly uint[][] tables = MakeTables();

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

    /// The CRC-32 of bytes after others that have `crc`, 0 of none; zlib's.
    static uint Crc32(uint crc, ReadOnlySpan<byte> bytes)
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

    public static long Count(long[] shape) => shape.Aggregate(1L, (product, dim) => checked(product * dim));

    public static string List(long[] numbers) => $"[{string.Join(", ", numbers)}]";

    InvalidDataException Bad(string text) => new InvalidDataException($"{path}: {text}");

    void ReadHeader()
    {
        if (file.Length < 8) throw Bad($"{file.Length} bytes, expected a safetensors file");
        var prefix = new byte[8];
        Read(0, prefix);
        long length = BitConverter.ToInt64(prefix, 0);
        if (length < 0 || length > file.Length - 8) throw Bad($"a header of {length} bytes; is the file truncated?");
        var header = new byte[length];
        Read(8, header);
        try
        {
            using (JsonDocument json = JsonDocument.Parse(header))
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

    // That all bytes before the checksum are those that were saved.
    void CheckBytes(Entry checksum)
    {
        if (checksum.End != file.Length) throw Bad("checksum is not its last tensor");
        uint found = 0;
        var part = new byte[1 << 20];
        for (long at = 0; at < checksum.Begin;)
        {
            Span<byte> bytes = part.AsSpan(0, (int)Math.Min(part.Length, checksum.Begin - at));
            Read(at, bytes);
            found = Crc32(found, bytes);
            at += bytes.Length;
        }
        if (found != BitConverter.ToUInt32(Bytes(checksum), 0))
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
        Read(entry.Begin, bytes);
        return bytes;
    }

    void Read(long from, Span<byte> to)
    {
        file.Position = from;
        while (to.Length > 0)
        {
            int count = file.Read(to);
            if (count == 0) throw Bad("cannot be read to its end");
            to = to.Slice(count);
        }
    }
}
