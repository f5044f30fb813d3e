package quantmoe;

import ai.onnxruntime.*;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.*;
import java.util.stream.LongStream;

/**
 * One of the model's inputs past_key_values.*: keys or values [1, heads, length, width], or a state of linear attention. A model of
 * --state-window has the states after each of its last tokens, in a dimension in front.
 */
final class CacheInput {
  /** A tensor and its memory. */
  static final class Tensor implements AutoCloseable {
    final OnnxTensor tensor;
    private final ByteBuffer memory;

    Tensor(OnnxTensor tensor, ByteBuffer memory) {
      this.tensor = tensor;
      this.memory = memory;
    }

    /** Return the bytes, which are a copy if ONNX Runtime made the tensor. */
    ByteBuffer bytes() {
      ByteBuffer found = memory == null ? tensor.getByteBuffer() : memory.duplicate();
      return found.order(ByteOrder.nativeOrder());
    }

    @Override
    public void close() {
      tensor.close();
    }
  }

  final String name, present, dtype;
  final boolean isState;
  private final OnnxJavaType type;
  private final long[] dims; // -1: the length
  private final int window; // dimensions in front of the batch's

  CacheInput(String name, TensorInfo info) {
    this.name = name;
    present = name.replace("past_key_values", "present");
    type = info.type;
    isState = name.endsWith("_state");
    dims = info.getShape();
    window = dims.length - (name.endsWith(".conv_state") ? 3 : 4);
    Map<OnnxJavaType, String> known =
        Map.of(OnnxJavaType.FLOAT, "F32", OnnxJavaType.FLOAT16, "F16", OnnxJavaType.BFLOAT16, "BF16", OnnxJavaType.INT8, "I8",
            OnnxJavaType.UINT8, "U8");
    dtype = known.get(type);
    if (dtype == null || (window != 0 && !(window == 1 && isState)))
      throw new ModelException(
          name + " is " + type + " " + Arrays.toString(dims) + ", which this release does not know");
    dims[window] = 1; // of the batch
  }

  private long[] shape(long slots) {
    return LongStream.of(dims).map(dim -> dim < 0 ? slots : dim).toArray();
  }

  /** Return the shape of so many tokens in a file. */
  long[] saved(long length) {
    return Arrays.copyOfRange(shape(length), window, dims.length);
  }

  Tensor allocate(OrtEnvironment environment, long slots) throws OrtException {
    long[] shape = shape(slots);
    int bytes = Math.toIntExact(LongStream.of(shape).reduce(type.size, Math::multiplyExact));
    ByteBuffer memory = ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
    return new Tensor(OnnxTensor.createTensor(environment, memory, shape, type), memory);
  }

  /** Return where the keys or values of the first tokens are in a tensor, or the last state of the window: the first byte of each piece. */
  int[] pieces(Tensor value) {
    long[] shape = value.tensor.getInfo().getShape();
    if (isState) return new int[] {Math.toIntExact(LongStream.of(shape).reduce(type.size, (a, b) -> a * b)) - bytes(0)};
    int[] begins = new int[Math.toIntExact(shape[1])];
    for (int head = 0; head < begins.length; head++) begins[head] = Math.toIntExact(head * shape[2] * shape[3] * type.size);
    return begins;
  }

  /** Return the bytes of a piece. */
  int bytes(long length) {
    return Math.toIntExact((isState ? LongStream.of(saved(0)).reduce(1, (a, b) -> a * b) : length * dims[dims.length - 1]) * type.size);
  }

  /** Return a copy of the first tokens, or of the state. */
  byte[] copy(Tensor value, long length) {
    int[] begins = pieces(value);
    int bytes = bytes(length);
    byte[] found = new byte[begins.length * bytes];
    ByteBuffer from = value.bytes();
    for (int i = 0; i < begins.length; i++) {
      from.position(begins[i]);
      from.get(found, i * bytes, bytes);
    }
    return found;
  }

  /** Return a copy of the state so many tokens before the last one of a step. */
  byte[] state(Tensor value, int back) {
    byte[] found = new byte[bytes(0)];
    value.bytes().position(pieces(value)[0] - back * found.length).get(found);
    return found;
  }

  /** Return after how many last tokens of a step there are states. */
  long window() {
    return window == 0 ? 1 : dims[0];
  }

  /** Put a copy back into a tensor that was allocated. */
  void put(byte[] copy, Tensor value, long length) {
    int bytes = bytes(length);
    ByteBuffer to = value.bytes();
    int[] begins = pieces(value);
    for (int i = 0; i < begins.length; i++) {
      to.position(begins[i]);
      to.put(copy, i * bytes, bytes);
    }
  }
}
