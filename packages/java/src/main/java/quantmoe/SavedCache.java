package quantmoe;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.regex.*;
import java.util.stream.LongStream;
import java.util.zip.CRC32;

/**
 * A prompt on disk, as {@code quantmoe generate --save-state} writes it: a safetensors file of tokens and what a cache has of them
 * (docs/reference/exported-folder.md, "Saved prompts"). Opened and checked.
 */
final class SavedCache implements AutoCloseable {
  private static final Pattern TENSOR = Pattern.compile("\\s*\"([^\"\\\\]*)\"\\s*:\\s*\\{([^{}]*)\\}\\s*([,}])");
  private static final Pattern DTYPE = Pattern.compile("\"dtype\"\\s*:\\s*\"([A-Z0-9]+)\"");
  private static final Pattern SHAPE = Pattern.compile("\"shape\"\\s*:\\s*\\[([0-9,\\s]*)\\]");
  private static final Pattern OFFSETS = Pattern.compile("\"data_offsets\"\\s*:\\s*\\[([0-9,\\s]*)\\]");

  private static final class Entry {
    final String dtype;
    final long[] shape;
    final long begin, end;

    Entry(String dtype, long[] shape, long begin, long end) {
      this.dtype = dtype;
      this.shape = shape;
      this.begin = begin;
      this.end = end;
    }
  }

  private final Path path;
  private final FileChannel file;
  private final List<CacheInput> inputs;
  private final SortedMap<String, Entry> entries = new TreeMap<>(); // those that nothing took
  private final Map<String, Entry> found = new HashMap<>(); // those of this model's cache
  private final SortedSet<Integer> ends = new TreeSet<>();
  private long[] tokens;

  /** Open a file and read its header alone. */
  private SavedCache(Path path, List<CacheInput> inputs) throws IOException {
    this.path = path;
    this.inputs = inputs;
    try {
      file = FileChannel.open(path);
    } catch (IOException error) {
      throw new IOException(path + ": cannot be read (" + error + ")", error);
    }
    closedUnless(this::readHeader);
  }

  private interface Check {
    void run() throws IOException;
  }

  private void closedUnless(Check check) throws IOException {
    try {
      check.run();
    } catch (IOException | RuntimeException error) {
      file.close();
      throw error;
    }
  }

  /**
   * Open a file of a model and check it.
   *
   * @throws ModelException the file is damaged or of another model
   */
  SavedCache(Path path, String identity, List<CacheInput> inputs) throws IOException {
    this(path, inputs);
    closedUnless(() -> check(identity));
  }

  private void check(String identity) throws IOException {
    ByteBuffer model = bytes(take("model", "U8", new long[] {identity.length()}));
    if (!StandardCharsets.US_ASCII.decode(model).toString().equals(identity)) throw bad("saved with another model: its identity is another");
    if (!entries.containsKey("checksum")) throw bad("checksum is missing: save it again");
    Entry checksum = take("checksum", "U32", new long[] {1});
    Entry row = entries.get("tokens");
    tokens = new long[row == null || row.shape.length == 0 ? 0 : Math.toIntExact((row.end - row.begin) / 8)];
    bytes(take("tokens", "I64", new long[] {tokens.length})).asLongBuffer().get(tokens);
    boolean hybrid = inputs.stream().anyMatch(input -> input.isState);
    for (String name : entries.keySet()) {
      Matcher end = Pattern.compile(".+@([0-9]{1,9})").matcher(name);
      if (hybrid && end.matches()) ends.add(Integer.parseInt(end.group(1)));
    }
    for (CacheInput input : inputs)
      if (!input.isState) found.put(input.name, take(input.name, input.dtype, input.saved(tokens.length)));
      else for (int end : ends) found.put(input.name + "@" + end, take(input.name + "@" + end, input.dtype, input.saved(0)));
    if (!entries.isEmpty()) throw bad(entries.firstKey() + " is not of this model's cache");
    if (hybrid && (ends.isEmpty() || ends.last() != tokens.length))
      throw bad("expected states after its " + tokens.length + " tokens, found those after " + ends);
    if (checksum.end != file.size()) throw bad("checksum is not its last tensor");
    CRC32 crc = new CRC32();
    ByteBuffer part = ByteBuffer.allocate(1 << 20);
    for (long at = 0; at < checksum.begin; at += part.limit()) {
      part.clear().limit((int) Math.min(part.capacity(), checksum.begin - at));
      read(at, part);
      crc.update(part.flip());
    }
    if ((int) crc.getValue() != bytes(checksum).getInt())
      throw bad("was altered or is damaged: its bytes have another CRC-32 than its checksum says");
  }

  /** Return the tokens that were read. */
  long[] tokens() {
    return tokens;
  }

  /** Put all that the file has of an input into a tensor that was allocated. */
  void load(CacheInput input, CacheInput.Tensor value) throws IOException {
    Entry entry = found.get(input.isState ? input.name + "@" + tokens.length : input.name);
    int bytes = input.bytes(tokens.length);
    long at = entry.begin;
    for (int begin : input.pieces(value)) {
      ByteBuffer piece = value.bytes();
      read(at, piece.position(begin).limit(begin + bytes));
      at += bytes;
    }
  }

  /** Return the states by the number of tokens that they are of. */
  SortedMap<Integer, List<byte[]>> loadStates() throws IOException {
    SortedMap<Integer, List<byte[]>> states = new TreeMap<>();
    for (int end : ends) {
      List<byte[]> made = new ArrayList<>();
      for (CacheInput input : inputs) if (input.isState) made.add(bytes(found.get(input.name + "@" + end)).array());
      states.put(end, made);
    }
    return states;
  }

  @Override
  public void close() throws IOException {
    file.close();
  }

  /** Write the cache of tokens, and states to go back to. The file has its name when all is there. */
  static void save(Path path, String identity, long[] tokens, List<CacheInput> inputs, CacheInput.Tensor[] cache,
      SortedMap<Integer, List<byte[]>> states) throws IOException {
    Path target = path;
    for (int links = 0; links < 40 && Files.isSymbolicLink(target); links++)
      target = target.resolveSibling(Files.readSymbolicLink(target)); // a link stays one
    if (!isReplaceable(target)) throw new IOException(path + ": is there, and is no saved state: expected an earlier one, or no file");
    // Savers of one path each write a file of their own.
    Path partial = target.resolveSibling(target.getFileName() + "." + UUID.randomUUID() + ".partial");
    try {
      try (FileChannel out = FileChannel.open(partial, StandardOpenOption.CREATE_NEW, StandardOpenOption.WRITE)) {
        write(out, identity, tokens, inputs, cache, states);
      }
      Files.move(partial, target, StandardCopyOption.ATOMIC_MOVE, StandardCopyOption.REPLACE_EXISTING);
    } catch (IOException error) {
      throw new IOException(path + ": cannot be written (" + error + ")", error);
    } finally {
      Files.deleteIfExists(partial);
    }
  }

  private static boolean isReplaceable(Path path) throws IOException {
    if (!Files.exists(path) || (Files.isRegularFile(path) && Files.size(path) == 0)) return true;
    try (SavedCache saved = new SavedCache(path, List.of())) {
      return saved.entries.keySet().containsAll(List.of("model", "tokens"));
    } catch (ModelException error) {
      return false;
    }
  }

  private static void write(FileChannel out, String identity, long[] tokens, List<CacheInput> inputs, CacheInput.Tensor[] cache,
      SortedMap<Integer, List<byte[]>> states) throws IOException {
    StringBuilder header = new StringBuilder();
    List<ByteBuffer> data = new ArrayList<>();
    long[] offset = {0};
    class Header {
      void add(String name, String dtype, long[] shape, List<ByteBuffer> pieces) {
        long end = offset[0] + pieces.stream().mapToLong(ByteBuffer::remaining).sum();
        header.append(header.length() == 0 ? "{" : ", ").append('"').append(name).append("\": {\"dtype\": \"").append(dtype);
        header.append("\", \"shape\": ").append(Arrays.toString(shape));
        header.append(", \"data_offsets\": [").append(offset[0]).append(", ").append(end).append("]}");
        offset[0] = end;
        data.addAll(pieces);
      }
    }
    Header add = new Header();
    add.add("model", "U8", new long[] {identity.length()}, List.of(StandardCharsets.US_ASCII.encode(identity)));
    ByteBuffer row = little(8 * tokens.length);
    row.asLongBuffer().put(tokens);
    add.add("tokens", "I64", new long[] {tokens.length}, List.of(row));
    for (int i = 0; i < cache.length; i++) {
      CacheInput input = inputs.get(i);
      if (input.isState) continue;
      List<ByteBuffer> pieces = new ArrayList<>();
      ByteBuffer from = cache[i].bytes();
      for (int begin : input.pieces(cache[i])) pieces.add(from.duplicate().position(begin).limit(begin + input.bytes(tokens.length)));
      add.add(input.name, input.dtype, input.saved(tokens.length), pieces);
    }
    for (Map.Entry<Integer, List<byte[]>> end : states.entrySet()) {
      Iterator<byte[]> state = end.getValue().iterator();
      for (CacheInput input : inputs)
        if (input.isState) add.add(input.name + "@" + end.getKey(), input.dtype, input.saved(0), List.of(ByteBuffer.wrap(state.next())));
    }
    ByteBuffer checksum = little(4);
    add.add("checksum", "U32", new long[] {1}, List.of(checksum));
    header.append('}').append(" ".repeat((8 - header.length() % 8) % 8));
    data.addAll(0, List.of(little(8).putLong(header.length()).flip(), StandardCharsets.US_ASCII.encode(header.toString())));
    CRC32 crc = new CRC32();
    for (ByteBuffer piece : data) {
      if (piece == checksum) piece.putInt((int) crc.getValue()).flip(); // of what is before it
      crc.update(piece.duplicate());
      while (piece.hasRemaining()) out.write(piece);
    }
  }

  private static ByteBuffer little(int bytes) {
    return ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
  }

  private ModelException bad(String text) {
    return new ModelException(path + ": " + text);
  }

  private void readHeader() throws IOException {
    long size = file.size();
    if (size < 8) throw bad(size + " bytes, expected a safetensors file");
    ByteBuffer number = little(8);
    read(0, number);
    long length = number.getLong(0);
    if (length < 0 || length > size - 8) throw bad("a header of " + length + " bytes; is the file truncated?");
    ByteBuffer bytes = ByteBuffer.allocate(Math.toIntExact(length));
    read(8, bytes);
    String header = StandardCharsets.UTF_8.decode(bytes.flip()).toString().trim();
    Matcher tensor = TENSOR.matcher(header);
    int at = header.startsWith("{") ? 1 : header.length();
    for (boolean more = true; more; at = tensor.end()) {
      if (!tensor.region(at, header.length()).lookingAt()) throw bad("corrupt header: expected a tensor at character " + at);
      more = tensor.group(3).equals(",");
      if (tensor.group(1).equals("__metadata__")) continue;
      long[] offsets = numbers(OFFSETS, tensor);
      if (offsets.length != 2 || offsets[0] > offsets[1] || offsets[1] > size - 8 - length)
        throw bad(tensor.group(1) + ": data_offsets " + Arrays.toString(offsets) + " in a file of " + size + " bytes; is it truncated?");
      Entry made = new Entry(field(DTYPE, tensor), numbers(SHAPE, tensor), 8 + length + offsets[0], 8 + length + offsets[1]);
      entries.put(tensor.group(1), made);
    }
    if (at != header.length()) throw bad("corrupt header: expected its end at character " + at);
  }

  private String field(Pattern pattern, Matcher tensor) {
    Matcher field = pattern.matcher(tensor.group(2));
    if (!field.find()) throw bad("corrupt header: " + tensor.group(1) + " lacks dtype, shape or data_offsets");
    return field.group(1);
  }

  private long[] numbers(Pattern pattern, Matcher tensor) {
    String[] found = field(pattern, tensor).trim().split("\\s*,\\s*");
    try {
      return Arrays.stream(found).filter(number -> !number.isEmpty()).mapToLong(Long::parseLong).toArray();
    } catch (NumberFormatException error) {
      throw bad("corrupt header: " + tensor.group(1) + ": " + error.getMessage());
    }
  }

  private Entry take(String name, String dtype, long[] shape) {
    Entry entry = entries.remove(name);
    if (entry == null) throw bad(name + " is missing");
    long size = dtype.equals("I64") ? 8 : dtype.endsWith("32") ? 4 : dtype.endsWith("16") ? 2 : 1;
    if (!entry.dtype.equals(dtype) || !Arrays.equals(entry.shape, shape)
        || entry.end - entry.begin != LongStream.of(shape).reduce(size, Math::multiplyExact))
      throw bad(name + " is " + entry.dtype + " " + Arrays.toString(entry.shape) + ", expected " + dtype + " " + Arrays.toString(shape)
          + " of this model");
    return entry;
  }

  private ByteBuffer bytes(Entry entry) throws IOException {
    ByteBuffer found = little(Math.toIntExact(entry.end - entry.begin));
    read(entry.begin, found);
    return found.flip();
  }

  /** Fill a buffer with the file's bytes from a place on. */
  private void read(long from, ByteBuffer to) throws IOException {
    for (long at = from; to.hasRemaining(); ) {
      int bytes;
      try {
        bytes = file.read(to, at);
      } catch (IOException error) { // a folder, for example
        throw new IOException(path + ": cannot be read (" + error + ")", error);
      }
      if (bytes < 0) throw bad("ends at byte " + at + "; is it truncated?");
      at += bytes;
    }
  }
}
