use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ort::memory::Allocator;
use ort::session::RunOptions;
use ort::value::{DynTensor, DynTensorValueType, Tensor, TensorElementType};

use quantmoe_text::Sampler;

use crate::cache_input::CacheInput;
use crate::generator::{locked, Model};
use crate::saved_cache::{self, SavedCache, States};
use crate::{Error, Generator, Options};

const CHUNK: usize = 512; // prompt tokens of a step
const TAIL: usize = 8; // tokens before a prompt's end, to whose states a hybrid model can go back
const MOST_STATES: usize = 4; // states are large

/// Ends an answer within a step, from any thread. Clones end the same answers.
#[derive(Clone, Default)]
pub struct Cancel {
    shared: Arc<(AtomicBool, Mutex<Option<Arc<RunOptions>>>)>,
}

impl Cancel {
    /// End the answers that were begun with this, and those that will be.
    pub fn cancel(&self) {
        self.shared.0.store(true, Ordering::SeqCst);
        if let Some(run) = locked(&self.shared.1).as_ref() {
            let _ = run.terminate();
        }
    }

    fn check(&self) -> Result<(), Error> {
        if self.shared.0.load(Ordering::SeqCst) {
            return Err(Error::Cancelled);
        }
        Ok(())
    }
}

impl fmt::Debug for Cancel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cancel({:?})", self.shared.0)
    }
}

/// What a model has read: the KV cache of one text. Generation that is cancelled leaves the tokens of whole steps, and goes on.
pub struct TokenCache {
    model: Arc<Model>,
    run: Arc<RunOptions>,
    shares: bool, // keys and values are written in place
    goes_back: bool,
    read: Vec<i64>,
    unread: Vec<i64>, // tokens of the text that no step has read
    states: States,
    slots: Vec<Slot>,
    capacity: usize,
}

/// The tensor of an input. A step reads a state from `value` and writes it into `spare`, which is then the value.
struct Slot {
    value: DynTensor,
    spare: Option<DynTensor>,
}

impl TokenCache {
    /// Make an empty cache.
    pub fn new(model: &Generator) -> Result<Self, Error> {
        Self::made(model, false)
    }

    /// Make an empty cache that keeps copies of a hybrid model's states, so that `keep` goes back to the end of a prompt. Other models
    /// can always go back.
    pub fn going_back(model: &Generator) -> Result<Self, Error> {
        Self::made(model, true)
    }

    fn made(model: &Generator, goes_back: bool) -> Result<Self, Error> {
        let model = Arc::clone(&model.model);
        let shares = model.value("past_present_share_buffer") == "true";
        let slot = |input: &CacheInput| {
            let spare = if shares && input.is_state { Some(input.allocate(0)?) } else { None };
            Ok(Slot { value: input.allocate(0)?, spare })
        };
        Ok(Self {
            run: model.new_run()?,
            shares,
            goes_back: goes_back && model.has_states(),
            read: Vec::new(),
            unread: Vec::new(),
            states: States::new(),
            slots: model.inputs.iter().map(slot).collect::<Result<_, Error>>()?,
            capacity: 0,
            model,
        })
    }

    /// Read a file of `save` or of `quantmoe generate --save-state`.
    pub fn load(model: &Generator, path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let mut made = Self::going_back(model)?;
        let model = Arc::clone(&made.model);
        let mut file = SavedCache::open(path, model.value("identity"))?;
        let (length, context) = (file.tokens.len(), model.context_length);
        if length > context {
            return Err(Error::Invalid(format!(
                "{}: has {length} tokens, the model's context has {context}",
                path.display()
            )));
        }
        if made.shares {
            made.reserve(length)?;
        } else {
            made.replace(length, 0)?;
        }
        for (input, slot) in model.inputs.iter().zip(&mut made.slots).filter(|(input, _)| !input.is_state) {
            file.load(input, &mut slot.value)?;
        }
        made.read = file.tokens.clone();
        made.states = file.load_states(&model.inputs)?;
        made.set_states(length);
        Ok(made)
    }

    /// Write the tokens that were read, as `quantmoe generate --save-state` does. The file has its name when all is there. A symbolic
    /// link stays a link.
    pub fn save(&mut self, path: impl AsRef<Path>) -> Result<(), Error> {
        self.model.check_open()?;
        let (path, model) = (path.as_ref(), Arc::clone(&self.model));
        let identity = model.value("identity");
        if identity.is_empty() {
            return Err(Error::Invalid(format!(
                "{}: no identity in its metadata; export it again",
                model.folder.display()
            )));
        }
        if self.read.is_empty() {
            return Err(Error::Invalid(format!("{}: the cache has no tokens to save", path.display())));
        }
        if model.has_states() {
            self.keep_states();
        }
        let slots = model.inputs.iter().zip(self.slots.iter_mut().map(|slot| &mut slot.value));
        let keys_and_values = slots.filter(|(input, _)| !input.is_state);
        saved_cache::save(path, identity, &self.read, keys_and_values, &model.inputs, &self.states)
    }

    /// The tokens that were read.
    pub fn tokens(&self) -> &[i64] {
        &self.read
    }

    /// Go back to the tokens with which a text begins, or as near before their end as states allow. Return the number of tokens kept,
    /// at most all of the text except the last, whose logits are needed.
    pub fn keep(&mut self, ids: &[i64]) -> Result<usize, Error> {
        self.model.check_open()?;
        let most = ids.len().saturating_sub(1);
        let mut same = self.read.iter().zip(&ids[..most]).take_while(|(a, b)| a == b).count();
        if same < self.read.len() && self.model.has_states() {
            same = self.states.range(..=same).next_back().map_or(0, |(&end, _)| end);
        }
        self.rewind(same)?;
        self.unread.clear();
        Ok(same)
    }

    /// Read ids after all that was read and said before, and return the tokens of the answer as they come. A token that ends the
    /// answer is the last one.
    pub fn generate(&mut self, ids: &[i64], options: &Options) -> Result<Tokens<'_>, Error> {
        self.model.check_open()?;
        let sampling = options.sampling.clone().unwrap_or_else(|| self.model.sampling.clone());
        sampling.check().map_err(|error| Error::Argument(error.0))?;
        let vocabulary = self.model.vocabulary;
        if let Some(id) = ids.iter().find(|id| !(0..vocabulary).contains(*id)) {
            let most = vocabulary - 1;
            return Err(Error::Argument(format!("token id {id} is outside the vocabulary, 0 to {most}")));
        }
        let ids = [&self.unread, ids].concat();
        if ids.is_empty() {
            return Err(Error::Argument("the prompt has no tokens".into()));
        }
        let (total, context) = (self.read.len() + ids.len(), self.model.context_length);
        if options.max_new_tokens > 0 && total >= context {
            return Err(Error::Argument(format!(
                "{total} tokens and 1 for the answer do not fit into the model's context of {context} tokens"
            )));
        }
        let sampler = Sampler::new(sampling, self.read.iter().chain(&ids).copied())?;
        let left = options.max_new_tokens.min(context - total);
        Ok(Tokens { cache: self, sampler, ids, left, cancel: options.cancel.clone() })
    }

    /// Read ids, and return the logits after the last of them.
    fn read(&mut self, mut ids: Vec<i64>, cancel: &Cancel) -> Result<Vec<f32>, Error> {
        let total = self.read.len() + ids.len();
        let short = self.model.short_context;
        if !self.read.is_empty() && self.read.len() <= short && total > short {
            ids = [&self.read, &ids[..]].concat(); // keys in the cache have the rotary frequencies of short texts
            self.rewind(0)?;
        }
        self.reserve(total)?;
        let before = std::mem::replace(&mut self.unread, ids.clone());
        // A hybrid model's prompt ends twice: for the same prompt again, and for one with another end.
        let copies = self.goes_back && ids.len() > 1;
        let tail = if copies && ids.len() > TAIL { ids.len() - TAIL } else { ids.len() };
        let (mut at, mut logits) = (0, None);
        while at < ids.len() {
            let least = if total > short && at == 0 && self.read.is_empty() { ids.len().min(short + 1) } else { 0 };
            let end = (at + CHUNK).max(least).min(if at < tail { tail } else { ids.len() });
            match self.step(&ids[at..end], end == ids.len(), cancel) {
                Ok(found) => logits = found,
                Err(error) => {
                    if !matches!(error, Error::Closed | Error::Cancelled) {
                        self.unread = before; // memory ran out, for example
                    }
                    return Err(error);
                }
            }
            self.unread.drain(..end - at);
            at = end;
            if copies && (end == tail || end == ids.len()) {
                self.keep_states();
            }
        }
        Ok(logits.expect("the last step gives logits"))
    }

    /// Run the model once. Return the logits after the last token, if they are wanted.
    fn step(&mut self, ids: &[i64], wanted: bool, cancel: &Cancel) -> Result<Option<Vec<f32>>, Error> {
        let (length, total) = (self.read.len(), self.read.len() + ids.len());
        let model = Arc::clone(&self.model);
        let mut session = model.session();
        let Some(session) = session.as_mut() else { return Err(Error::Closed) };
        // In this order: a model that is closed or an answer that is cancelled from now on ends the run.
        self.run.unterminate()?;
        *locked(&cancel.shared.1) = Some(Arc::clone(&self.run));
        model.check_open()?;
        cancel.check()?;

        let row = |values: Vec<i64>| Tensor::from_array(([1, values.len()], values));
        let mut binding = session.create_binding()?;
        binding.bind_input("input_ids", &row(ids.to_vec())?)?;
        binding.bind_input("attention_mask", &row(vec![1; total])?)?;
        binding.bind_input("position_ids", &row((length as i64..total as i64).collect())?)?;
        let allocator = Allocator::default();
        let memory = allocator.memory_info();
        for (input, slot) in model.inputs.iter().zip(&mut self.slots) {
            binding.bind_input(&input.name, &slot.value)?;
            match (&mut slot.spare, self.shares) {
                (Some(spare), _) => binding.bind_output(&input.present, spare)?,
                (None, true) => binding.bind_output(&input.present, &mut slot.value)?,
                (None, false) => binding.bind_output_to_device(&input.present, memory)?,
            }
        }
        binding.bind_output_to_device("logits", memory)?;
        let run = session.run_binding_with_options(&binding, &self.run);
        locked(&cancel.shared.1).take();
        let mut outputs = match run {
            Ok(outputs) => outputs,
            Err(error) => {
                model.check_open()?;
                cancel.check()?;
                return Err(error.into());
            }
        };
        let missing =
            |name: &str| Error::Invalid(format!("{}: the model has no output {name}", model.folder.display()));
        let logits = outputs.remove("logits").ok_or_else(|| missing("logits"))?.downcast::<DynTensorValueType>()?;
        let logits = if wanted { Some(last_logits(&logits)?) } else { None };
        for (input, slot) in model.inputs.iter().zip(&mut self.slots) {
            if let Some(spare) = &mut slot.spare {
                std::mem::swap(spare, &mut slot.value);
            } else if !self.shares {
                slot.value = outputs
                    .remove(&input.present)
                    .ok_or_else(|| missing(&input.present))?
                    .downcast::<DynTensorValueType>()?;
            }
        }
        self.read.extend(ids);
        Ok(logits)
    }

    fn rewind(&mut self, length: usize) -> Result<(), Error> {
        if length == self.read.len() {
            return Ok(());
        }
        if !self.shares {
            self.replace(length, length)?;
        }
        self.set_states(length);
        self.read.truncate(length);
        self.states.retain(|&end, _| end <= length);
        Ok(())
    }

    /// Make room for so many tokens. It doubles, so that a token's copies cost little.
    fn reserve(&mut self, tokens: usize) -> Result<(), Error> {
        if !self.shares || tokens <= self.capacity {
            return Ok(());
        }
        let slots = tokens.max(2 * self.capacity).max(256).min(self.model.context_length);
        self.replace(slots, self.read.len())?;
        self.capacity = slots;
        Ok(())
    }

    /// Make keys and values tensors of so many slots, with the first tokens of the old ones.
    fn replace(&mut self, slots: usize, length: usize) -> Result<(), Error> {
        for (input, slot) in self.model.inputs.iter().zip(&mut self.slots) {
            if !(input.is_state && self.shares) {
                let mut made = input.allocate(slots)?;
                input.copy(&mut slot.value, &mut made, length);
                slot.value = made;
            }
        }
        Ok(())
    }

    /// Put the copies of the states after so many tokens back.
    fn set_states(&mut self, length: usize) {
        if length > 0 && self.model.has_states() {
            let slots = self.model.inputs.iter().zip(&mut self.slots).filter(|(input, _)| input.is_state);
            for ((input, slot), state) in slots.zip(&self.states[&length]) {
                input.set_state(&mut slot.value, state);
            }
        }
    }

    fn keep_states(&mut self) {
        let slots = self.model.inputs.iter().zip(&mut self.slots).filter(|(input, _)| input.is_state);
        self.states.insert(self.read.len(), slots.map(|(input, slot)| input.state(&mut slot.value)).collect());
        while self.states.len() > MOST_STATES {
            self.states.pop_first();
        }
    }
}

/// The tokens of an answer, as they come.
pub struct Tokens<'a> {
    cache: &'a mut TokenCache,
    sampler: Sampler,
    ids: Vec<i64>,
    left: usize,
    cancel: Cancel,
}

impl Iterator for Tokens<'_> {
    type Item = Result<i64, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        let logits = self.cache.read(std::mem::take(&mut self.ids), &self.cancel);
        match logits.and_then(|mut logits| Ok(self.sampler.choose(&mut logits)?)) {
            Err(error) => {
                self.left = 0;
                Some(Err(error))
            }
            Ok(id) => {
                if self.cache.model.stop_tokens.contains(&id) {
                    self.left = 0; // what follows an answer begins with the token that ends it
                } else {
                    self.ids = vec![id];
                    self.cache.unread = vec![id];
                }
                Some(Ok(id))
            }
        }
    }
}

/// Return the numbers at the last position of logits [1, sequence, vocabulary].
fn last_logits(logits: &DynTensor) -> Result<Vec<f32>, Error> {
    let last = |count: usize| count - *logits.shape().last().unwrap_or(&0) as usize;
    let found: Vec<f32> = match logits.data_type() {
        TensorElementType::Float32 => {
            let (_, values) = logits.try_extract_tensor::<f32>()?;
            values[last(values.len())..].to_vec()
        }
        TensorElementType::Float16 => {
            let (_, values) = logits.try_extract_tensor::<half::f16>()?;
            values[last(values.len())..].iter().map(|value| value.to_f32()).collect()
        }
        TensorElementType::Bfloat16 => {
            let (_, values) = logits.try_extract_tensor::<half::bf16>()?;
            values[last(values.len())..].iter().map(|value| value.to_f32()).collect()
        }
        other => return Err(Error::Invalid(format!("logits are {other}, expected f32, f16 or bf16"))),
    };
    if found.iter().any(|number| !number.is_finite()) {
        return Err(Error::Invalid("logits are not finite".into()));
    }
    Ok(found)
}
