package quantmoe;

import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.concurrent.locks.*;

/** A folder's chat template, rendered by libquantmoe_text. Any number of threads may use it. */
final class ChatTemplate implements AutoCloseable {
  private static boolean loaded;
  private final ReadWriteLock gate = new ReentrantReadWriteLock();
  private long handle;

  /**
   * Read the default template of a folder.
   *
   * @throws ModelException there is none, or it is damaged
   * @throws UnsupportedOperationException this jar has no libquantmoe_text for the platform
   */
  ChatTemplate(String folder) {
    load();
    handle = open(bytes(folder));
    if (handle == 0) throw new ModelException(text(error()));
  }

  private static synchronized void load() {
    if (!loaded) System.load(QuantMoE.pathOf("quantmoe_text", ""));
    loaded = true;
  }

  /**
   * Return the last of a conversation's messages with all that the template writes around it: from the end of the answer before it, or
   * from the begin, to where its answer begins.
   *
   * @param system null: none
   * @throws ModelException the template refuses the messages
   */
  String turn(String system, List<String> messages) {
    gate.readLock().lock();
    try {
      if (handle == 0) throw new IllegalStateException("the model is closed; open it again");
      byte[][] texts = messages.stream().map(ChatTemplate::bytes).toArray(byte[][]::new);
      byte[] turn = turn(handle, system == null ? null : bytes(system), texts);
      if (turn == null) throw new ModelException(text(error()));
      return text(turn);
    } finally {
      gate.readLock().unlock();
    }
  }

  @Override
  public void close() {
    gate.writeLock().lock();
    try {
      if (handle != 0) free(handle);
      handle = 0;
    } finally {
      gate.writeLock().unlock();
    }
  }

  private static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  private static String text(byte[] bytes) {
    return new String(bytes, StandardCharsets.UTF_8);
  }

  private static native long open(byte[] folder);

  private static native byte[] turn(long template, byte[] system, byte[][] messages);

  private static native byte[] error();

  private static native void free(long template);
}
