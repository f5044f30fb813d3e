using System.IO;
using System.Linq;
using Microsoft.ML.OnnxRuntime;
using Microsoft.ML.OnnxRuntime.Tensors;

namespace QuantMoe
{
    /// <summary>
    /// One of the model's inputs past_key_values.*: keys or values [1, heads, length, width], or a state of linear attention.
    /// A model of --state-window has the states after each of its last tokens, in a dimension in front.
    /// </summary>
    sealed class CacheInput
    {
        public readonly string Name, Present, Dtype;
        public readonly TensorElementType Type;
        public readonly bool IsState;
        public readonly int Size; // bytes of a number
        readonly long[] dims; // -1: the length
        readonly int window; // dimensions in front of the batch's

        public CacheInput(string name, NodeMetadata input)
        {
            (Name, Present, Type) = (name, name.Replace("past_key_values", "present"), input.ElementDataType);
            IsState = name.EndsWith("_state");
            dims = input.Dimensions.Select(dim => (long)dim).ToArray();
            window = dims.Length - (name.EndsWith(".conv_state") ? 3 : 4);
            if (window != 0 && !(window == 1 && IsState))
                throw new InvalidDataException($"{name} has shape {SavedCache.List(dims)}, which this release does not know");
            dims[window] = 1; // of the batch
            (Dtype, Size) = Type switch
            {
                TensorElementType.Float => ("F32", 4),
                TensorElementType.Float16 => ("F16", 2),
                TensorElementType.BFloat16 => ("BF16", 2),
                TensorElementType.Int8 => ("I8", 1),
                TensorElementType.UInt8 => ("U8", 1),
                _ => throw new InvalidDataException($"{name} is {Type}, which this release does not know"),
            };
        }

        /// <summary>After how many last tokens of a step there are states.</summary>
        public long Window => window == 0 ? 1 : dims[0];

        /// <summary>Return the shape of a cache's tensor with so many slots.</summary>
        public long[] Shape(long slots) => dims.Select(dim => dim < 0 ? slots : dim).ToArray();

        /// <summary>Return the shape of so many tokens in a file.</summary>
        public long[] Saved(long length) => Shape(length).Skip(window).ToArray();

        public OrtValue Allocate(long slots) =>
            OrtValue.CreateAllocatedTensorValue(OrtAllocator.DefaultInstance, Type, Shape(slots));

        /// <summary>
        /// Return where the keys or values of the first tokens are in a cache's tensor, or the last state of the window: so
        /// many pieces of so many bytes, a stride apart.
        /// </summary>
        public (int Begin, int Count, int Stride, int Bytes) Pieces(OrtValue value, long length)
        {
            long[] shape = value.GetTensorTypeAndShape().Shape;
            if (!IsState)
                return (0, checked((int)shape[1]), checked((int)(shape[2] * shape[3] * Size)), checked((int)(length * shape[3] * Size)));
            int bytes = checked((int)(SavedCache.Count(Saved(0)) * Size));
            return (checked((int)(SavedCache.Count(shape) * Size)) - bytes, 1, 0, bytes);
        }
    }
}
