package quantmoe;

import ai.onnxruntime.*;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.locks.*;

/** An exported model that generates tokens. Any number of threads may use it, each with a cache or conversation of its own. */
public final class Generator implements AutoCloseable {
  /** Changes the options of a session, for example threads, entries or an execution provider. */
  public interface Configure {
    /**
     * Change the options.
     *
     * @param options the options of the session
     * @throws OrtException ONNX Runtime refuses one
     */
    void apply(OrtSession.SessionOptions options) throws OrtException;
  }

  final OrtEnvironment environment = OrtEnvironment.getEnvironment(OrtLoggingLevel.ORT_LOGGING_LEVEL_ERROR);
  final OrtSession session;
  final List<CacheInput> inputs = new ArrayList<>();
  final ReadWriteLock gate = new ReentrantReadWriteLock(); // a step reads
  final long vocabulary; // token ids are below it
  final long shortContext; // longer texts are run again from their first token (longrope)
  private final Set<TokenCache> caches = new HashSet<>();
  private final String folder;
  private final Map<String, String> metadata;
  private final long contextLength;
  private final List<Long> stopTokens = new ArrayList<>();
  final Drafts drafts;
  final TensorInfo hidden; // null: the model gives no hidden states
  final String hiddenName;
  Generator layer; // of mtp.onnx; null: nobody drafts with it
  private final OnnxTensor numLogits;
  private final long logitsOfStep; // as declared; -1: one of each token
  private Sampling sampling;
  private TextTokenizer tokenizer;
  private ChatTemplate template;
  private volatile boolean closing;

  /**
   * Open an exported folder.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @throws ModelException the folder has no model, or a damaged one
   * @throws UnsupportedOperationException this jar has no library for the platform
   */
  public Generator(String folder) {
    this(folder, options -> {});
  }

  /**
   * Open an exported folder on a device.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @param device where the model runs: as it was exported
   * @throws ModelException the folder has no model, or a damaged one
   * @throws UnsupportedOperationException the folder is for another device, this ONNX Runtime has no CUDA provider, or no jar has a library
   *     for the platform
   */
  public Generator(String folder, Device device) {
    this(folder, options -> {}, Drafts.NONE, device);
  }

  /**
   * Open an exported folder with other options of the session.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @param configure changes the options
   * @throws ModelException the folder has no model, or a damaged one
   * @throws UnsupportedOperationException this jar has no library for the platform
   */
  public Generator(String folder, Configure configure) {
    this(folder, configure, Drafts.NONE);
  }

  /**
   * Open an exported folder whose answers are drafted.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @param configure changes the options
   * @param drafts how tokens are drafted
   * @throws ModelException the folder has no model, or a damaged one
   * @throws UnsupportedOperationException the export cannot verify so many draft tokens, or this jar has no library for the platform
   */
  public Generator(String folder, Configure configure, Drafts drafts) {
    this(folder, configure, drafts, Device.CPU);
  }

  /**
   * Open an exported folder on a device, with other options of the session and drafted answers.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @param configure changes the options
   * @param drafts how tokens are drafted
   * @param device where the model runs: as it was exported
   * @throws ModelException the folder has no model, or a damaged one
   * @throws UnsupportedOperationException the export cannot verify so many draft tokens or is for another device, this ONNX Runtime has no
   *     CUDA provider, or no jar has a library for the platform
   */
  public Generator(String folder, Configure configure, Drafts drafts, Device device) {
    this(folder, "model.onnx", configure, drafts, device);
    try {
      if (drafts.kind != Drafts.Kind.NONE) checkDrafts();
      layer = drafts.kind == Drafts.Kind.MTP ? new Generator(folder, "mtp.onnx", configure, Drafts.NONE, device) : null;
    } catch (RuntimeException error) {
      close();
      throw error;
    }
  }

  private Generator(String folder, String file, Configure configure, Drafts drafts, Device device) {
    this.folder = Objects.requireNonNull(folder, "folder is null");
    this.drafts = Objects.requireNonNull(drafts, "drafts is null");
    Objects.requireNonNull(configure, "configure is null");
    Objects.requireNonNull(device, "device is null");
    Path path = Path.of(folder, file);
    if (folder.isEmpty() || !Files.isRegularFile(path))
      throw new ModelException((folder.isEmpty() ? "\"\"" : path) + ": missing; expected the folder of an exported model");
    OnnxTensor initializer = null;
    boolean opened = false;
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      configure.apply(options);
      initializer = drafts.most > 0 ? OnnxTensor.createTensor(environment, new long[] {drafts.most + 1L}) : null;
      numLogits = initializer;
      if (numLogits != null) options.addInitializer("num_logits", numLogits); // lives as long as the session
      String library = QuantMoE.libraryPath(device);
      if (device == Device.CUDA) {
        if (!OrtEnvironment.getAvailableProviders().contains(OrtProvider.CUDA))
          throw new UnsupportedOperationException(
              "this ONNX Runtime has no CUDA provider; take com.microsoft.onnxruntime:onnxruntime_gpu instead of onnxruntime");
        options.addCUDA();
      }
      options.registerCustomOpLibrary(library); // reads the session's entries
      session = environment.createSession(path.toString(), options);
      opened = true;
      metadata = Collections.unmodifiableMap(session.getMetadata().getCustomMetadata());
      for (NodeInfo input : session.getInputInfo().values())
        if (input.getName().startsWith("past_key_values."))
          inputs.add(new CacheInput(input.getName(), (TensorInfo) input.getInfo()));
      Map<String, NodeInfo> outputs = session.getOutputInfo();
      String output = outputs.containsKey("hidden_states_out") ? "hidden_states_out" : "hidden_states";
      hidden = !outputs.containsKey(output) ? null : (TensorInfo) outputs.get(output).getInfo();
      hiddenName = hidden == null ? null : output;
      long[] logits = outputs.containsKey("logits") ? ((TensorInfo) outputs.get("logits").getInfo()).getShape() : new long[] {1, 1, -1};
      logitsOfStep = logits[1];
      vocabulary = logits[2] > 0 ? logits[2] : Long.MAX_VALUE;
    } catch (OrtException error) {
      checkDevice(path, device, error);
      throw new ModelException(error);
    } finally {
      if (!opened && initializer != null) initializer.close();
    }
    contextLength = Long.parseLong(metadata.getOrDefault("context_length", "" + Long.MAX_VALUE));
    shortContext = Long.parseLong(metadata.getOrDefault("short_context", "" + Long.MAX_VALUE));
    for (String id : value("eos_token_id").split(",")) if (!id.isEmpty()) stopTokens.add(Long.parseLong(id));
  }

  /** Fail if a model that cannot be opened was exported for the other device. An entry of its metadata says so. */
  private void checkDevice(Path model, Device device, OrtException cause) {
    boolean cpu = device == Device.CPU;
    try {
      if (!new String(Files.readAllBytes(model), StandardCharsets.ISO_8859_1).contains("\n\6target\22" + (cpu ? "\4cuda" : "\3cpu"))) return;
    } catch (IOException error) {
      return; // the cause says it
    }
    throw new UnsupportedOperationException(
        String.format("%s: exported for %s; open it with Device.%s, or export it with --target %s",
            folder, cpu ? "NVIDIA GPUs" : "CPUs", cpu ? Device.CUDA : Device.CPU, cpu ? "cpu" : "cuda"),
        cause);
  }

  /** @return the folder as it was given */
  public String folder() {
    return folder;
  }

  /** @return the model's metadata */
  public Map<String, String> metadata() {
    return metadata;
  }

  /** @return the most tokens of a text, prompt and answers together */
  public long contextLength() {
    return contextLength;
  }

  /** @return the ids of the tokens after which an answer ends */
  public List<Long> stopTokens() {
    return Collections.unmodifiableList(stopTokens);
  }

  /**
   * Return how the model's makers choose tokens, from generation_config.json.
   *
   * @return their options; without the file, the likeliest token
   * @throws ModelException the file is damaged, or a number is outside its range
   */
  public synchronized Sampling sampling() {
    if (sampling == null) sampling = Sampling.ofFolder(folder);
    return sampling;
  }

  /**
   * Return the folder's tokenizer.
   *
   * @return the tokenizer, which is read once
   * @throws ModelException the folder has no tokenizer.json, or a damaged one
   * @throws IllegalStateException the model is closed
   */
  public synchronized TextTokenizer tokenizer() {
    checkOpen();
    if (tokenizer == null) tokenizer = new TextTokenizer(folder);
    return tokenizer;
  }

  String value(String name) {
    return metadata.getOrDefault(name, "");
  }

  /** Fail unless a step gives the logits and the states after a token and each of its draft tokens. */
  private void checkDrafts() {
    if (drafts.most > contextLength)
      throw new IllegalArgumentException("most is " + drafts.most + ", expected a number from 1 to " + contextLength);
    long tokens = drafts.most + 1L, rows = tokens;
    boolean layered = drafts.kind == Drafts.Kind.MTP;
    if (layered && metadata.containsKey("short_context"))
      throw new UnsupportedOperationException(
          folder + ": rope_type longrope with a layer of multi-token prediction is not supported; take Drafts.ngram");
    if (!metadata.containsKey("num_logits")) rows = logitsOfStep == 1 ? 1 : Long.parseLong(metadata.getOrDefault("logits", "" + tokens));
    StringBuilder options = new StringBuilder();
    if (rows < tokens) options.append(" --logits ").append(tokens);
    if (inputs.stream().anyMatch(input -> input.isState && input.window() < tokens)) options.append(" --state-window ").append(tokens);
    if (layered && (hidden == null || !Files.exists(Path.of(folder, "mtp.onnx")))) options.append(" --mtp");
    if (options.length() > 0)
      throw new UnsupportedOperationException(folder + ": " + drafts.most + " draft tokens need an export with" + options);
  }

  synchronized ChatTemplate template() {
    checkOpen();
    if (template == null) template = new ChatTemplate(folder);
    return template;
  }

  boolean hasStates() {
    return inputs.stream().anyMatch(input -> input.isState);
  }

  boolean closing() {
    return closing;
  }

  void checkOpen() {
    if (closing) throw new IllegalStateException("the model is closed; open it again");
  }

  void add(TokenCache cache) {
    synchronized (caches) {
      checkOpen();
      caches.add(cache);
    }
  }

  void remove(TokenCache cache) {
    synchronized (caches) {
      caches.remove(cache);
    }
  }

  /** Cancel answers that are being generated, wait for their last step, and close the model and its caches. */
  @Override
  public void close() {
    List<TokenCache> open;
    synchronized (caches) {
      if (closing) return;
      closing = true;
      open = List.copyOf(caches);
    }
    for (TokenCache cache : open) cache.close();
    if (layer != null) layer.close();
    synchronized (this) {
      if (tokenizer != null) tokenizer.close();
      if (template != null) template.close();
    }
    gate.writeLock().lock();
    try {
      session.close();
      if (numLogits != null) numLogits.close();
    } catch (OrtException error) {
      throw new ModelException(error);
    } finally {
      gate.writeLock().unlock();
    }
  }
}
