package quantmoe;

/** ONNX Runtime refuses a model or fails, or a file of the folder is damaged. */
public final class ModelException extends RuntimeException {
  private static final long serialVersionUID = 1;

  ModelException(String message) {
    super(message);
  }

  ModelException(Throwable cause) {
    super(cause.getMessage(), cause);
  }
}
