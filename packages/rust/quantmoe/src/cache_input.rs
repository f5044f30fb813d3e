use ort::memory::Allocator;
use ort::value::{DynTensor, TensorElementType, ValueType};

use crate::Error;

/// One of the model's inputs past_key_values.*: keys or values [1, heads, length, width], or a state of linear attention.
/// A model of --state-window has the states after each of its last tokens, in a dimension in front.
pub(crate) struct CacheInput {
    pub name: String,
    pub present: String,
    pub dtype: &'static str,
    pub is_state: bool,
    kind: TensorElementType,
    size: usize,    // bytes of a number
    dims: Vec<i64>, // -1: the length
    window: usize,  // dimensions in front of the batch's
}

impl CacheInput {
    pub fn new(name: &str, input: &ValueType) -> Result<Self, Error> {
        let wrong = |what: String| Error::Invalid(format!("{name} {what}, which this release does not know"));
        let (Some(shape), Some(kind)) = (input.tensor_shape(), input.tensor_type()) else {
            return Err(wrong("is no tensor".into()));
        };
        let mut dims = shape.to_vec();
        let is_state = name.ends_with("_state");
        let least = if name.ends_with(".conv_state") { 3 } else { 4 };
        let window = match dims.len().checked_sub(least) {
            Some(window) if window == 0 || (window == 1 && is_state) => window,
            _ => return Err(wrong(format!("has shape {dims:?}"))),
        };
        dims[window] = 1; // of the batch
        let (dtype, size) = match kind {
            TensorElementType::Float32 => ("F32", 4),
            TensorElementType::Float16 => ("F16", 2),
            TensorElementType::Bfloat16 => ("BF16", 2),
            TensorElementType::Int8 => ("I8", 1),
            TensorElementType::Uint8 => ("U8", 1),
            other => return Err(wrong(format!("is {other}"))),
        };
        let present = name.replace("past_key_values", "present");
        Ok(Self { name: name.into(), present, dtype, is_state, kind, size, dims, window })
    }

    /// Return the shape of a cache's tensor with so many slots.
    fn shape(&self, slots: usize) -> Vec<i64> {
        self.dims.iter().map(|&dim| if dim < 0 { slots as i64 } else { dim }).collect()
    }

    /// Return the shape of so many tokens in a file.
    pub fn saved(&self, length: usize) -> Vec<i64> {
        self.shape(length).split_off(self.window)
    }

    pub fn allocate(&self, slots: usize) -> Result<DynTensor, Error> {
        Ok(DynTensor::new(&Allocator::default(), self.kind, self.shape(slots))?)
    }

    /// Return where the keys or values of the first tokens are in a cache's tensor, or the last state of the window: the first byte of
    /// each piece, and the bytes of a piece.
    pub fn pieces(&self, value: &DynTensor, length: usize) -> (Vec<usize>, usize) {
        let shape: Vec<usize> = value.shape().iter().map(|&dim| dim as usize).collect();
        if self.is_state {
            let bytes = self.saved(0).iter().product::<i64>() as usize * self.size;
            return (vec![shape.iter().product::<usize>() * self.size - bytes], bytes);
        }
        let stride = shape[2] * shape[3] * self.size;
        ((0..shape[1]).map(|head| head * stride).collect(), length * shape[3] * self.size)
    }

    /// Return a tensor's bytes.
    pub fn bytes<'a>(&self, value: &'a mut DynTensor) -> &'a mut [u8] {
        let size = value.shape().num_elements() * self.size;
        let data = value.data_ptr_mut().cast::<u8>();
        if size == 0 {
            return &mut [];
        }
        // The tensor is in CPU memory, has so many bytes, and is borrowed as long as they are.
        unsafe { std::slice::from_raw_parts_mut(data, size) }
    }

    /// Copy the first tokens of one tensor into another, or the state.
    pub fn copy(&self, from: &mut DynTensor, to: &mut DynTensor, length: usize) {
        let ((sources, bytes), (targets, _)) = (self.pieces(from, length), self.pieces(to, length));
        let (from, to) = (self.bytes(from), self.bytes(to));
        for (source, target) in sources.into_iter().zip(targets) {
            to[target..target + bytes].copy_from_slice(&from[source..source + bytes]);
        }
    }

    /// Return a copy of the state.
    pub fn state(&self, value: &mut DynTensor) -> Vec<u8> {
        let (begin, bytes) = self.pieces(value, 0);
        self.bytes(value)[begin[0]..begin[0] + bytes].to_vec()
    }

    /// Put a copy of the state back.
    pub fn set_state(&self, value: &mut DynTensor, state: &[u8]) {
        let (begin, bytes) = self.pieces(value, 0);
        self.bytes(value)[begin[0]..begin[0] + bytes].copy_from_slice(state);
    }
}
