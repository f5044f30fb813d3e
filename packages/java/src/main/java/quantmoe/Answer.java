package quantmoe;

import java.util.*;
import java.util.function.Supplier;

/**
 * What an answer gives, as it comes: tokens or pieces of text, for one loop. It throws {@link java.util.concurrent.CancellationException}
 * after {@link #cancel}, {@link IllegalStateException} after the model is closed, and {@link ModelException} if ONNX Runtime fails.
 *
 * @param <T> Long or String
 */
public final class Answer<T> implements Iterable<T>, Iterator<T> {
  private final Supplier<T> next; // gives null at the end
  private final Runnable cancel;
  private T item;
  private boolean over;

  Answer(Supplier<T> next, Runnable cancel) {
    this.next = next;
    this.cancel = cancel;
  }

  /** End the answer within a step, from any thread. What came is kept, and the next answer goes on from there. */
  public void cancel() {
    cancel.run();
  }

  @Override
  public Iterator<T> iterator() {
    return this;
  }

  @Override
  public boolean hasNext() {
    if (item == null && !over) {
      over = true; // unless an item comes
      item = next.get();
      over = item == null;
    }
    return item != null;
  }

  @Override
  public T next() {
    if (!hasNext()) throw new NoSuchElementException("the answer is over");
    T found = item;
    item = null;
    return found;
  }
}
