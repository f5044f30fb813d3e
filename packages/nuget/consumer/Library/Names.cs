using Microsoft.ML.OnnxRuntime;

public static class Names
{
    public static InferenceSession Open(string folder)
    {
        using var options = new Microsoft.ML.OnnxRuntime.SessionOptions();
        options.RegisterQuantMoe();
        return new InferenceSession(folder + "/model.onnx", options);
    }
}
