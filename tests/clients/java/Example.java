import attention.ApiClient;
import attention.ApiException;
import attention.api.AttentionApi;
import attention.api.InferenceProtocolApi;
import attention.model.AttentionRequest;
import attention.model.ElementType;
import attention.model.EncodedArray;
import attention.model.Encoding;
import attention.model.IncludedOutput;
import attention.model.InferenceInput;
import attention.model.InferenceRequest;
import attention.model.LinearMap;
import attention.model.Problem;
import attention.model.Projection;
import attention.model.TensorDatatype;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Base64;
import java.util.List;
import java.util.Map;

/** The generated client. The server's address is the first argument. */
public final class Example {
    private static final List<List<Double>> EYE = List.of(List.of(1.0, 0.0), List.of(0.0, 1.0));

    public static void main(String[] arguments) throws Exception {
        ApiClient client = new ApiClient();
        client.updateBaseUri(arguments[0]);
        AttentionApi api = new AttentionApi(client);

        var direct = api.computeAttention(new AttentionRequest().query(EYE).key(EYE)
            .value(List.of(List.of(1.0), List.of(2.0))).scale(number("0")).include(List.of(IncludedOutput.SCORES)));
        same(direct.getOutput(), List.of(List.of(1.5), List.of(1.5)));
        same(direct.getScores(), EYE);
        same(direct.getMetadata().getNumHeads(), 1);

        LinearMap twice = new LinearMap().kernel(List.of(List.of(2.0, 0.0), List.of(0.0, 2.0)));
        var projected = api.computeAttention(
            new AttentionRequest().input(EYE).scale(number("0")).projection(new Projection().value(twice)));
        same(projected.getOutput(), List.of(List.of(1.0, 1.0), List.of(1.0, 1.0)));

        var masked = api.computeAttention(
            new AttentionRequest().input(EYE).mask(List.of(List.of(true, false), List.of(false, true))));
        same(masked.getAttentionWeights(), EYE);

        ByteBuffer bytes = ByteBuffer.allocate(16).order(ByteOrder.LITTLE_ENDIAN);
        for (float number : new float[] {1, 0, 0, 1}) bytes.putFloat(number);
        EncodedArray tensor = new EncodedArray().dtype(ElementType.FLOAT32).shape(List.of(2, 2)).data(bytes.array());
        var typed = api.computeAttention(
            new AttentionRequest().input(tensor).scale(number("0")).encoding(Encoding.BASE64));
        Map<?, ?> output = (Map<?, ?>) typed.getOutput();
        byte[] content = Base64.getDecoder().decode((String) output.get("data"));
        same(ByteBuffer.wrap(content).order(ByteOrder.LITTLE_ENDIAN).getFloat(12), 0.5f);

        try {
            api.computeAttention(new AttentionRequest().query(EYE).key(List.of(List.of(1.0))).value(List.of(List.of(1.0))));
            throw new AssertionError("no error");
        } catch (ApiException error) {
            Problem problem = client.getObjectMapper().readValue(error.getResponseBody(), Problem.class);
            same(error.getCode(), 422);
            same(problem.getCode(), "shape_mismatch");
            same(problem.getErrors().get(0).getPointer(), "/key");
        }

        InferenceInput input = new InferenceInput().name("input").shape(List.of(2, 2)).datatype(TensorDatatype.FP32)
            .data(List.of(1, 0, 0, 1));
        var inferred = new InferenceProtocolApi(client)
            .infer("attention", new InferenceRequest().inputs(List.of(input)).parameters(Map.of("scale", 0)));
        same(inferred.getOutputs().get(0).getData(), List.of(0.5, 0.5, 0.5, 0.5));
        System.out.println("all as expected");
    }

    private static java.math.BigDecimal number(String text) {
        return new java.math.BigDecimal(text);
    }

    private static void same(Object got, Object expected) {
        if (!expected.equals(got)) throw new AssertionError(got + " instead of " + expected);
    }
}
