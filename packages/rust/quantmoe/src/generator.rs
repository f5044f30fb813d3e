use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use ort::environment::Environment;
use ort::session::builder::SessionBuilder;
use ort::session::{RunOptions, Session};

use crate::cache_input::CacheInput;
use crate::{Error, Sampling, TextError, TextTokenizer};

/// An exported model that generates tokens. Clones are the same model, and any thread may use them. Steps of several
/// answers take turns; open the folder once for each thread to run them at a time. Weights are mapped, and shared.
#[derive(Clone)]
pub struct Generator {
    pub(crate) model: Arc<Model>,
}

pub(crate) struct Model {
    pub folder: PathBuf,
    pub metadata: HashMap<String, String>,
    pub context_length: usize,
    /// Longer texts are run again from their first token (longrope).
    pub short_context: usize,
    /// Token ids are below it.
    pub vocabulary: i64,
    pub stop_tokens: Vec<i64>,
    pub sampling: Sampling,
    pub inputs: Vec<CacheInput>,
    pub closing: AtomicBool,
    session: Mutex<Option<Session>>,
    runs: Mutex<Vec<Weak<RunOptions>>>,
    tokenizer: OnceLock<Result<Arc<TextTokenizer>, TextError>>,
}

impl Generator {
    /// Open an exported folder.
    ///
    /// `ORT_DYLIB_PATH` names ONNX Runtime's library, `QUANTMOE_ORT_LIBRARY` the library of the operators. Without the second
    /// variable the folder's copy is loaded, which is native code of whoever exported the folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, Error> {
        Self::open_with(folder, |options| Ok(options))
    }

    /// Open an exported folder with other options of the session, for example threads or entries.
    pub fn open_with(
        folder: impl AsRef<Path>,
        configure: impl FnOnce(SessionBuilder) -> Result<SessionBuilder, ort::Error<SessionBuilder>>,
    ) -> Result<Self, Error> {
        let folder = folder.as_ref();
        let file = folder.join("model.onnx");
        if folder.as_os_str().is_empty() || !file.is_file() {
            let given = if folder.as_os_str().is_empty() { "\"\"".into() } else { file.display().to_string() };
            return Err(Error::Invalid(format!("{given}: missing; expected the folder of an exported model")));
        }
        let library = std::env::var_os("QUANTMOE_ORT_LIBRARY").map_or(folder.join(library_name()), PathBuf::from);
        let session = configure(Session::builder(environment()?)?)?
            .with_operator_library(library) // reads the session's entries
            .map_err(|error| {
                Error::Runtime(format!(
                    "{}; set QUANTMOE_ORT_LIBRARY to {}, for example the one in QuantMoE's wheel",
                    error.message(),
                    library_name()
                ))
            })?
            .commit_from_file(file)?;
        Self::of_session(folder, session)
    }

    /// Take a session of your own that runs the folder's model.onnx.
    pub fn of_session(folder: impl AsRef<Path>, session: Session) -> Result<Self, Error> {
        let folder = folder.as_ref().to_owned();
        let mut metadata = HashMap::new();
        {
            let found = session.metadata()?;
            for key in found.custom_keys()? {
                let value = found.custom(&key).unwrap_or_default();
                metadata.insert(key, value);
            }
        }
        let number = |name| metadata.get(name).and_then(|text: &String| text.parse().ok());
        let ids = metadata.get("eos_token_id").map_or("", String::as_str).split(',').filter(|id| !id.is_empty());
        let wrong =
            |id: &str| Error::Invalid(format!("{}: eos_token_id has {id:?}, expected a token id", folder.display()));
        let logits = session.outputs().iter().find(|output| output.name() == "logits");
        let size = logits.and_then(|output| output.dtype().tensor_shape()?.last().copied());
        let inputs = session.inputs().iter().filter(|input| input.name().starts_with("past_key_values."));
        let model = Model {
            context_length: number("context_length").unwrap_or(usize::MAX),
            short_context: number("short_context").unwrap_or(usize::MAX),
            vocabulary: size.filter(|size| *size > 0).unwrap_or(i64::MAX),
            stop_tokens: ids.map(|id| id.parse().map_err(|_| wrong(id))).collect::<Result<_, _>>()?,
            sampling: Sampling::of_folder(&folder).map_err(|error| Error::Invalid(error.0))?,
            inputs: inputs.map(|input| CacheInput::new(input.name(), input.dtype())).collect::<Result<_, _>>()?,
            closing: AtomicBool::new(false),
            session: Mutex::new(Some(session)),
            runs: Mutex::default(),
            tokenizer: OnceLock::new(),
            folder,
            metadata,
        };
        Ok(Self { model: Arc::new(model) })
    }

    /// The folder as it was given.
    pub fn folder(&self) -> &Path {
        &self.model.folder
    }

    /// The model's metadata.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.model.metadata
    }

    /// The most tokens of a text, prompt and answers together.
    pub fn context_length(&self) -> usize {
        self.model.context_length
    }

    /// The ids of the tokens after which an answer ends.
    pub fn stop_tokens(&self) -> &[i64] {
        &self.model.stop_tokens
    }

    /// How the model's makers choose tokens, from generation_config.json.
    pub fn sampling(&self) -> &Sampling {
        &self.model.sampling
    }

    /// The folder's tokenizer.
    pub fn tokenizer(&self) -> Result<Arc<TextTokenizer>, Error> {
        let model = &self.model;
        model.check_open()?;
        Ok(model.tokenizer.get_or_init(|| TextTokenizer::open(&model.folder).map(Arc::new)).clone()?)
    }

    /// Cancel answers that are being generated, wait for their last step, and close the model. Later calls give `Error::Closed`.
    pub fn close(&self) {
        self.model.closing.store(true, Ordering::SeqCst);
        for run in locked(&self.model.runs).drain(..).filter_map(|run| run.upgrade()) {
            let _ = run.terminate();
        }
        locked(&self.model.session).take();
    }
}

impl Model {
    pub fn has_states(&self) -> bool {
        self.inputs.iter().any(|input| input.is_state)
    }

    pub fn value(&self, name: &str) -> &str {
        self.metadata.get(name).map_or("", String::as_str)
    }

    pub fn check_open(&self) -> Result<(), Error> {
        if self.closing.load(Ordering::SeqCst) {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Make what ends a cache's runs when the model is closed.
    pub fn new_run(&self) -> Result<Arc<RunOptions>, Error> {
        let run = Arc::new(RunOptions::new()?);
        let mut runs = locked(&self.runs);
        self.check_open()?; // close comes after this and ends the run, or has come
        runs.retain(|run| run.strong_count() > 0);
        runs.push(Arc::downgrade(&run));
        Ok(run)
    }

    /// Return the session, which one thread uses at a time.
    pub fn session(&self) -> MutexGuard<'_, Option<Session>> {
        locked(&self.session)
    }
}

pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Return the one environment of a process.
fn environment() -> Result<&'static Environment, Error> {
    static MADE: Mutex<()> = Mutex::new(());
    static ENVIRONMENT: OnceLock<Environment> = OnceLock::new();
    let _one = locked(&MADE);
    if let Some(made) = ENVIRONMENT.get() {
        return Ok(made);
    }
    let path = std::env::var_os("ORT_DYLIB_PATH").map_or(PathBuf::from(runtime_name()), PathBuf::from);
    let builder = ort::init_from(path).map_err(|error| {
        Error::Runtime(format!(
            "ONNX Runtime {error}; set ORT_DYLIB_PATH to its library, for example the one in Python's package"
        ))
    })?;
    Ok(ENVIRONMENT.get_or_init(|| builder.build().expect("the process has one environment")))
}

fn library_name() -> String {
    format!("{}quantmoe_ort{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}

fn runtime_name() -> String {
    format!("{}onnxruntime{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX)
}
