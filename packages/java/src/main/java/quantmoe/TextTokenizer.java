package quantmoe;

import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer;
import java.io.IOException;
import java.nio.file.*;
import java.util.Map;
import java.util.concurrent.locks.*;
import java.util.function.Supplier;

/** A folder's tokenizer.json. Any number of threads may use it. */
public final class TextTokenizer implements AutoCloseable {
  private final HuggingFaceTokenizer tokenizer;
  private final ReadWriteLock gate = new ReentrantReadWriteLock();
  private boolean closed;

  /**
   * Read a tokenizer.json. Truncation and padding are off.
   *
   * @param folder the folder that {@code quantmoe export} wrote
   * @throws ModelException the folder has no tokenizer.json, or a damaged one
   */
  public TextTokenizer(String folder) {
    Path path = Path.of(folder, "tokenizer.json");
    if (!Files.exists(path))
      throw new ModelException(
          path + " is missing: the model takes token ids; the folder's README.md says why. Use TokenCache");
    // The tokenizer is in its jar; without this DJL asks the network.
    if (System.getProperty("ai.djl.offline") == null) System.setProperty("ai.djl.offline", "true");
    try {
      tokenizer = HuggingFaceTokenizer.newInstance(path, Map.of("truncation", "false", "padding", "false"));
    } catch (IOException | RuntimeException error) {
      throw new ModelException(path + ": " + error.getMessage());
    }
  }

  /**
   * Return the token ids of a text.
   *
   * @param text the text
   * @param special add the special tokens at the begin and end of a text
   * @return the ids
   */
  public long[] encode(String text, boolean special) {
    return open(() -> tokenizer.encode(text, special, false).getIds());
  }

  /**
   * Return the text of token ids.
   *
   * @param ids the ids
   * @param special leave the special tokens among them in the text
   * @return the text
   */
  public String decode(long[] ids, boolean special) {
    return open(() -> tokenizer.decode(ids, !special));
  }

  private <T> T open(Supplier<T> use) {
    gate.readLock().lock();
    try {
      if (closed) throw new IllegalStateException("the tokenizer is closed; open the model again");
      return use.get();
    } finally {
      gate.readLock().unlock();
    }
  }

  /** Wait for calls of other threads, and free the tokenizer. */
  @Override
  public void close() {
    gate.writeLock().lock();
    try {
      if (!closed) tokenizer.close();
      closed = true;
    } finally {
      gate.writeLock().unlock();
    }
  }
}
