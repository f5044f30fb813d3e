package quantmoe;

import ai.onnxruntime.*;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.util.*;
import java.util.concurrent.CancellationException;
import java.util.concurrent.locks.ReentrantLock;
import java.util.stream.LongStream;

/**
 * What a model has read: the KV cache of one text. It generates one answer at a time. Generation that is cancelled leaves the tokens of
 * whole steps, and goes on. It is native memory that Java does not count: close it.
 */
public final class TokenCache implements AutoCloseable {
  private static final int CHUNK = 512; // prompt tokens of a step
  private static final int TAIL = 8; // tokens before a prompt's end, to whose states a hybrid model can go back
  private static final int MOST_STATES = 4; // states are large
  private static final int PENDING = 256; // tokens that the layer of multi-token prediction reads at once

  private final Generator model;
  private final boolean shares; // keys and values are written in place
  private final boolean goesBack;
  private final ReentrantLock gate = new ReentrantLock(); // held by each use of native memory
  private final TokenCache layer; // of mtp.onnx; null: nobody drafts with it
  private final OrtSession.RunOptions run;
  private final CacheInput.Tensor[] cache, spare; // a step reads a state from one and writes it into the other
  private final TreeMap<Integer, List<byte[]>> states = new TreeMap<>();
  private OrtSession.Result last; // has a cache that is not written in place
  private long[] read = new long[256], unread = {}; // tokens of the text that no step has read
  private int length;
  private int ahead, drafted, accepted; // draft tokens at the end that were not given, or given last
  private byte[] hidden = {}, given; // hidden states of the last step, and those that the next step reads
  private long[] heard = {}; // tokens that the layer has not read, with the hidden states before them, and the last token's
  private byte[] heardHidden = {}, heardLast = {};
  private long capacity;
  private int answers;
  private int lastStep; // tokens of the last step
  private volatile Object cancelled; // the answer that was cancelled
  private volatile boolean closing;
  private boolean closed;

  /**
   * Make an empty cache.
   *
   * @param model the model that reads and answers
   */
  public TokenCache(Generator model) {
    this(model, false);
  }

  /**
   * Make an empty cache.
   *
   * @param model the model that reads and answers
   * @param goesBack keep copies of a hybrid model's states, so that {@link #keep} goes back to the end of a prompt and files of
   *     {@link #save} serve prompts that begin alike. Other models can always go back.
   */
  public TokenCache(Generator model, boolean goesBack) {
    this.model = Objects.requireNonNull(model, "model is null");
    this.goesBack = goesBack && model.hasStates();
    layer = model.layer == null ? null : new TokenCache(model.layer);
    shares = model.value("past_present_share_buffer").equals("true");
    cache = new CacheInput.Tensor[model.inputs.size()];
    spare = new CacheInput.Tensor[cache.length];
    try {
      run = new OrtSession.RunOptions();
      for (int i = 0; i < cache.length; i++) {
        cache[i] = model.inputs.get(i).allocate(model.environment, 0);
        if (shares && model.inputs.get(i).isState) spare[i] = model.inputs.get(i).allocate(model.environment, 0);
      }
    } catch (OrtException error) {
      throw new ModelException(error);
    }
    try {
      model.add(this); // the model may be closed from now on
    } catch (IllegalStateException error) {
      close();
      throw error;
    }
  }

  /**
   * Read a file of {@link #save} or of {@code quantmoe generate --save-state}.
   *
   * @param model the model that wrote the file
   * @param path the file
   * @param goesBack as for an empty cache
   * @return a cache that goes on from there
   * @throws ModelException the file is damaged or of another model
   * @throws IOException the file cannot be read
   */
  public static TokenCache load(Generator model, Path path, boolean goesBack) throws IOException {
    TokenCache made = new TokenCache(model, goesBack);
    try (SavedCache file = new SavedCache(path, model.value("identity"), model.inputs)) {
      made.fill(file, path);
      return made;
    } catch (IOException | RuntimeException error) {
      made.close();
      throw error;
    }
  }

  private void fill(SavedCache file, Path path) throws IOException {
    gate.lock();
    try {
      checkOpen();
      long[] tokens = file.tokens();
      if (tokens.length > model.contextLength())
        throw new ModelException(path + ": has " + tokens.length + " tokens, the model's context has " + model.contextLength());
      if (shares) reserve(tokens.length);
      else replace(tokens.length, 0);
      for (int i = 0; i < cache.length; i++) file.load(model.inputs.get(i), cache[i]);
      states.putAll(file.loadStates());
      read = tokens;
      length = tokens.length;
    } catch (OrtException error) {
      throw new ModelException(error);
    } finally {
      gate.unlock();
    }
  }

  /**
   * Write the tokens that were read, as {@code quantmoe generate --save-state} does. The file has its name when all is there. A symbolic
   * link stays a link.
   *
   * @param path the file; an earlier saved state is replaced
   * @throws IOException the file cannot be written, or is there and no saved state
   * @throws IllegalStateException the cache or the model is closed, or the cache has no tokens
   */
  public void save(Path path) throws IOException {
    gate.lock();
    try {
      checkOpen();
      String identity = model.value("identity");
      if (identity.isEmpty()) throw new ModelException(model.folder() + ": no identity in its metadata; export it again");
      settle();
      if (length == 0) throw new IllegalStateException(path + ": the cache has no tokens to save");
      if (model.hasStates()) keepStates();
      SavedCache.save(path, identity, tokens(), model.inputs, cache, states);
    } catch (OrtException error) {
      throw new ModelException(error);
    } finally {
      gate.unlock();
    }
  }

  /** @return the tokens that were read */
  public long[] tokens() {
    return Arrays.copyOf(read, length - ahead);
  }

  int drafted() {
    return drafted;
  }

  int accepted() {
    return accepted;
  }

  /**
   * Go back to the tokens with which a text begins, or as near before their end as states allow.
   *
   * @param ids the text
   * @return the number of tokens kept, at most all of the text except the last, whose logits are needed
   */
  public int keep(long[] ids) {
    Objects.requireNonNull(ids, "ids is null");
    gate.lock();
    try {
      checkOpen();
      settle();
      int same = 0;
      while (same < Math.min(length, ids.length - 1) && read[same] == ids[same]) same++;
      if (same < length && model.hasStates()) {
        Integer end = states.floorKey(same);
        same = end == null ? 0 : end;
      }
      rewind(same);
      unread = new long[0];
      answers++;
      return same;
    } catch (OrtException error) {
      throw new ModelException(error);
    } finally {
      gate.unlock();
    }
  }

  /**
   * Read ids after all that was read and said before. A token that ends the answer is the last one. The next answer ends this one.
   *
   * @param ids new tokens of the text
   * @param options the most tokens, and how they are chosen
   * @return the tokens of the answer, as they come
   * @throws IllegalArgumentException there are no tokens to read, they do not fit into the context, or one is outside the vocabulary
   * @throws IllegalStateException the cache or the model is closed
   */
  public Answer<Long> generate(long[] ids, Options options) {
    Objects.requireNonNull(ids, "ids is null");
    Objects.requireNonNull(options, "options is null");
    for (long id : ids)
      if (id < 0 || id >= model.vocabulary)
        throw new IllegalArgumentException("token id " + id + " is outside the vocabulary, 0 to " + (model.vocabulary - 1));
    gate.lock();
    try {
      checkOpen();
      settle();
      long[] first = joined(unread, unread.length, ids);
      if (first.length == 0) throw new IllegalArgumentException("the prompt has no tokens");
      long total = length + first.length, context = model.contextLength();
      if (options.maxNewTokens > 0 && total >= context)
        throw new IllegalArgumentException(
            total + " tokens and 1 for the answer do not fit into the model's context of " + context + " tokens");
      Sampling sampling = options.sampling == null ? model.sampling() : options.sampling;
      Sampler sampler = new Sampler(sampling, LongStream.of(joined(read, length, first)));
      drafted = accepted = 0;
      if (layer != null) layer.keep(new long[0]);
      heard = new long[0];
      heardHidden = heardLast = new byte[0];
      Steps steps = new Steps(first, Math.min(options.maxNewTokens, context - total), sampler, ++answers);
      return new Answer<>(steps::next, () -> cancel(steps));
    } catch (OrtException error) {
      throw new ModelException(error);
    } finally {
      gate.unlock();
    }
  }

  private void cancel(Object steps) {
    cancelled = steps;
    terminate(true);
    if (layer != null) layer.cancel(steps);
  }

  /** The tokens of an answer, one after the other. */
  private final class Steps {
    private long[] next, drafts = {};
    private long left;
    private int at, most = model.drafts.most;
    private float[][] rows = {};
    private final Sampler sampler;
    private final int number;

    Steps(long[] first, long left, Sampler sampler, int number) {
      next = first;
      this.left = left;
      this.sampler = sampler;
      this.number = number;
    }

    /** Return the next token; null: the answer is over. */
    Long next() {
      long count = left;
      left = 0; // unless a token comes
      if (count <= 0) return null;
      gate.lock();
      try {
        checkOpen();
        if (number != answers) throw new IllegalStateException("another answer was begun");
        long id = sampler.choose(logits(count));
        ahead = drafts.length - at;
        boolean over = model.stopTokens().contains(id);
        unread = over ? new long[0] : new long[] {id}; // what follows an answer begins with the token that ends it
        left = over ? 0 : count - 1;
        if (left > 0 && ahead > 0 && drafts[at] == id) {
          at++;
          accepted++;
          return id;
        }
        settle();
        if (drafts.length > 0) {
          most = Math.min(model.drafts.most, Math.max(1, 2 * at));
          hear(joined(next, 1, Arrays.copyOf(drafts, at)), this);
        }
        next = new long[] {id};
        at = rows.length;
        return id;
      } catch (OrtException error) {
        throw ended(error, this);
      } finally {
        gate.unlock();
      }
    }

    private float[] logits(long count) throws OrtException {
      if (at == rows.length) {
        drafts = rows.length == 0 ? drafts : draft(next[0], (int) Math.min(most, count - 1), this);
        rows = read(next, drafts, this);
        at = 0;
        drafted += drafts.length;
      }
      return rows[at];
    }
  }

  /** Return what an answer throws after a run that failed. */
  private RuntimeException ended(OrtException error, Object steps) {
    checkOpen();
    return cancelled == steps ? new CancellationException("the answer was cancelled") : new ModelException(error);
  }

  /** Read ids, and return the logits after the last of them. The logits after each draft token follow. */
  private float[][] read(long[] ids, long[] drafts, Object steps) throws OrtException {
    if (drafts.length > 0) { // they are not unread if the run fails
      reserve(length + ids.length + drafts.length);
      return step(joined(ids, ids.length, drafts), ids.length + drafts.length, steps);
    }
    long[] before = unread;
    try {
      long total = length + ids.length, limit = model.shortContext;
      if (length > 0 && length <= limit && total > limit) {
        ids = joined(read, length, ids); // keys in the cache have the rotary frequencies of short texts
        rewind(0);
      }
      reserve(total);
      unread = ids;
      // A hybrid model's prompt ends twice: for the same prompt again, and for one with another end.
      boolean copies = goesBack && ids.length > 1;
      int tail = copies && ids.length > TAIL ? ids.length - TAIL : ids.length;
      float[][] logits = {};
      for (int at = 0, end; at < ids.length; at = end) {
        int least = total > limit && at == 0 && length == 0 ? (int) Math.min(limit + 1, ids.length) : 0;
        end = Math.min(Math.max(at + CHUNK, least), at < tail ? tail : ids.length);
        long[] part = Arrays.copyOfRange(ids, at, end);
        logits = step(part, end == ids.length ? 1 : 0, steps);
        unread = Arrays.copyOfRange(ids, end, ids.length);
        hear(part, steps);
        if (copies && (end == tail || end == ids.length)) keepStates();
      }
      return logits;
    } catch (OrtException error) {
      RuntimeException thrown = ended(error, steps);
      if (thrown instanceof ModelException) unread = before; // memory ran out, for example
      throw thrown;
    }
  }

  /** Return tokens that may follow the tokens that were read and one more. */
  private long[] draft(long last, int most, Object steps) throws OrtException {
    long begin = length + 1, limit = model.shortContext, context = model.contextLength();
    int count = (int) Math.min(most, (begin <= limit ? Math.min(limit, context) : context) - begin);
    if (model.drafts.kind == Drafts.Kind.NONE || count < 1) return new long[0];
    if (layer != null) return draftByLayer(last, count, steps);
    long[] text = joined(read, length, new long[] {last});
    for (int n = 4; n > 1; n--) // what followed the longest end that was there before, at the latest place
      for (int at = text.length - 1; at >= n; at--)
        if (Arrays.equals(text, text.length - n, text.length, text, at - n, at))
          return Arrays.copyOfRange(text, at, Math.min(at + count, text.length));
    return new long[0];
  }

  /**
   * Return draft tokens of the layer. It gives the token after the next one, from a token's hidden state and the next token. It goes on
   * from its own hidden state and that token.
   */
  private long[] draftByLayer(long last, int count, Object steps) throws OrtException {
    if (heardLast.length == 0) return new long[0];
    int known = layer.length + heard.length;
    long[] ids = joined(heard, heard.length, new long[] {last}), found = new long[count];
    byte[] hidden = joined(heardHidden, heardLast);
    heard = new long[0];
    heardHidden = new byte[0];
    for (int i = 0; i < count; i++) {
      float[] logits = layer.follow(ids, hidden, 1, steps)[0];
      for (int id = 1; id < logits.length; id++) if (logits[id] > logits[(int) found[i]]) found[i] = id;
      ids = new long[] {found[i]};
      hidden = Arrays.copyOfRange(layer.hidden, layer.hidden.length - heardLast.length, layer.hidden.length);
    }
    layer.crop(layer.length - known);
    return found;
  }

  /** Take tokens that are certain, whose hidden states are the first ones of the last step. */
  private void hear(long[] ids, Object steps) throws OrtException {
    if (layer == null) return;
    int width = hidden.length / lastStep, before = (ids.length - 1) * width;
    heardHidden = joined(joined(heardHidden, heardLast), Arrays.copyOf(hidden, before));
    heard = joined(heard, heard.length, Arrays.copyOfRange(ids, heardLast.length == 0 ? 1 : 0, ids.length));
    heardLast = Arrays.copyOfRange(hidden, before, before + width);
    if (heard.length < PENDING) return;
    layer.follow(heard, heardHidden, 0, steps);
    heard = new long[0];
    heardHidden = new byte[0];
  }

  /** Read ids with hidden states of the model. */
  private float[][] follow(long[] ids, byte[] hidden, int wanted, Object steps) throws OrtException {
    gate.lock();
    try {
      checkOpen();
      reserve(length + ids.length);
      given = hidden;
      return step(ids, wanted, steps);
    } finally {
      gate.unlock();
    }
  }

  /** Take back draft tokens that are not of the answer. */
  private void settle() throws OrtException {
    int back = ahead;
    ahead = 0;
    crop(back);
  }

  /** Go back over so many of the last step's tokens. */
  private void crop(int back) throws OrtException {
    if (back == 0) return;
    List<byte[]> found = new ArrayList<>();
    for (int i = 0; i < cache.length; i++) if (model.inputs.get(i).isState) found.add(model.inputs.get(i).state(cache[i], back));
    length -= back;
    if (!shares) replace(length, length);
    Iterator<byte[]> state = found.iterator();
    for (int i = 0; i < cache.length; i++) if (model.inputs.get(i).isState) model.inputs.get(i).put(state.next(), cache[i], 0);
  }

  /** Run the model once. Return the logits after the last so many tokens. */
  private float[][] step(long[] ids, int wanted, Object steps) throws OrtException {
    long total = length + ids.length;
    Map<String, OnnxTensor> inputs = new HashMap<>(), pinned = new HashMap<>();
    for (int i = 0; i < cache.length; i++) {
      CacheInput input = model.inputs.get(i);
      inputs.put(input.name, cache[i].tensor);
      if (shares) pinned.put(input.present, (spare[i] == null ? cache[i] : spare[i]).tensor);
    }
    Set<String> outputs = new HashSet<>(model.session.getOutputNames());
    outputs.removeAll(pinned.keySet());
    if (model.hidden != null && model.drafts.kind != Drafts.Kind.MTP && given == null) outputs.remove(model.hiddenName);
    model.gate.readLock().lock();
    try (OnnxTensor tokens = row(LongStream.of(ids));
        OnnxTensor mask = row(LongStream.range(0, total).map(i -> 1));
        OnnxTensor positions = row(LongStream.range(length, total));
        OnnxTensor states = given == null ? null : hiddenStates(ids.length)) {
      if (states != null) inputs.put("hidden_states", states);
      inputs.putAll(Map.of("input_ids", tokens, "attention_mask", mask, "position_ids", positions));
      // In this order: a model that is closed or an answer that is cancelled from now on ends the run.
      terminate(false);
      checkOpen();
      if (cancelled == steps) throw new CancellationException("the answer was cancelled");
      OrtSession.Result result = model.session.run(inputs, outputs, pinned, run);
      float[][] logits;
      try {
        logits = logits((OnnxTensor) result.get("logits").orElseThrow(), wanted);
        if (outputs.contains(model.hiddenName)) {
          ByteBuffer bytes = ((OnnxTensor) result.get(model.hiddenName).orElseThrow()).getByteBuffer();
          hidden = new byte[bytes.remaining()];
          bytes.get(hidden);
        }
      } catch (ModelException error) {
        result.close();
        throw error;
      }
      for (int i = 0; i < cache.length; i++) {
        if (spare[i] != null) {
          CacheInput.Tensor state = cache[i];
          cache[i] = spare[i];
          spare[i] = state;
        } else if (!shares) {
          if (last == null) cache[i].close();
          cache[i] = new CacheInput.Tensor((OnnxTensor) result.get(model.inputs.get(i).present).orElseThrow(), null);
        }
      }
      if (last != null) last.close();
      last = shares ? null : result;
      if (shares) result.close();
      read = joined(read, length, ids);
      length += ids.length;
      lastStep = ids.length;
      return logits;
    } finally {
      model.gate.readLock().unlock();
    }
  }

  private OnnxTensor row(LongStream values) throws OrtException {
    return OnnxTensor.createTensor(model.environment, new long[][] {values.toArray()});
  }

  private OnnxTensor hiddenStates(int tokens) throws OrtException {
    ByteBuffer memory = ByteBuffer.allocateDirect(given.length).order(ByteOrder.nativeOrder()).put(given).flip();
    return OnnxTensor.createTensor(model.environment, memory, new long[] {1, tokens, model.hidden.getShape()[2]}, model.hidden.type);
  }

  /** Return the numbers at the last so many positions of logits [1, sequence, vocabulary]. */
  private static float[][] logits(OnnxTensor tensor, int count) {
    var values = tensor.getFloatBuffer(); // f16 and bf16 are converted
    float[][] found = new float[count][(int) tensor.getInfo().getShape()[2]];
    if (count > 0) values.position(values.limit() - count * found[0].length);
    for (float[] row : found) {
      values.get(row);
      for (float number : row) if (!Float.isFinite(number)) throw new ModelException("logits are not finite");
    }
    return found;
  }

  private void rewind(int to) throws OrtException {
    if (to == length) return;
    if (!shares) replace(to, to);
    if (to > 0 && model.hasStates()) {
      Iterator<byte[]> state = states.get(to).iterator();
      for (int i = 0; i < cache.length; i++)
        if (model.inputs.get(i).isState) model.inputs.get(i).put(state.next(), cache[i], 0);
    }
    length = to;
    states.tailMap(to, false).clear();
  }

  /** Make room for so many tokens. It doubles, so that a token's copies cost little. */
  private void reserve(long tokens) throws OrtException {
    if (!shares || tokens <= capacity) return;
    long slots = Math.min(model.contextLength(), Math.max(tokens, Math.max(2 * capacity, 256)));
    replace(slots, length);
    capacity = slots;
  }

  /** Make keys and values tensors of so many slots, with the first tokens of the old ones. */
  private void replace(long slots, int tokens) throws OrtException {
    for (int i = 0; i < cache.length; i++) {
      CacheInput input = model.inputs.get(i);
      if (input.isState && shares) continue;
      CacheInput.Tensor made = input.allocate(model.environment, slots);
      input.put(input.copy(cache[i], tokens), made, tokens);
      if (last == null) cache[i].close();
      cache[i] = made;
    }
    if (last != null) last.close();
    last = null;
  }

  private void keepStates() {
    List<byte[]> found = new ArrayList<>();
    for (int i = 0; i < cache.length; i++)
      if (model.inputs.get(i).isState) found.add(model.inputs.get(i).copy(cache[i], 0));
    states.put(length, found);
    while (states.size() > MOST_STATES) states.pollFirstEntry();
  }

  private static long[] joined(long[] first, int count, long[] second) {
    long[] all = Arrays.copyOf(first, count + second.length);
    System.arraycopy(second, 0, all, count, second.length);
    return all;
  }

  private static byte[] joined(byte[] first, byte[] second) {
    byte[] all = Arrays.copyOf(first, first.length + second.length);
    System.arraycopy(second, 0, all, first.length, second.length);
    return all;
  }

  private void checkOpen() {
    model.checkOpen();
    if (closing) throw new IllegalStateException("the cache is closed; make another");
  }

  private void terminate(boolean value) {
    synchronized (run) {
      try {
        if (!closed) run.setTerminate(value);
      } catch (OrtException error) {
        throw new ModelException(error);
      }
    }
  }

  /** Cancel an answer that is being generated, wait for its step, and free the cache. */
  @Override
  public void close() {
    if (layer != null) layer.close();
    closing = true;
    terminate(true);
    gate.lock();
    try {
      synchronized (run) {
        if (closed) return;
        closed = true;
        run.close();
      }
      for (CacheInput.Tensor tensor : cache) if (last == null && tensor != null) tensor.close();
      for (CacheInput.Tensor tensor : spare) if (tensor != null) tensor.close();
      if (last != null) last.close();
    } finally {
      gate.unlock();
    }
    model.remove(this);
  }
}
