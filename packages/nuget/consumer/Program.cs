using Microsoft.ML.OnnxRuntime;

using var options = new Microsoft.ML.OnnxRuntime.SessionOptions();
options.RegisterQuantMoe();
using var session = new InferenceSession(args[0] + "/model.onnx", options);
using InferenceSession other = Names.Open(args[0]);
Console.WriteLine("session: " + string.Join(" ", session.InputNames));
