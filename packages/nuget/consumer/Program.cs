using System;
using Microsoft.ML.OnnxRuntime;

using var options = new SessionOptions();
options.RegisterQuantMoe();
using var session = new InferenceSession(args[0] + "/model.onnx", options);
Console.WriteLine("session: " + string.Join(" ", session.InputNames));
